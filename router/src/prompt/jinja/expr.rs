//! Expressions, calls and look-ups.

use super::error::{Error, ErrorKind};
use super::library::args::Args;
use super::library::methods;
use super::ops;
use super::scope::Machine;
use super::tree::{self, Callee, Comparison, Const, Expr, MacroDecl, Node, Op};
use super::value::{self, Map, Value};

impl<'r> Machine<'r> {
    /// The value of an expression.
    pub(crate) fn eval(&mut self, expr: &'r Expr) -> Result<Value<'r>, Error> {
        match &expr.node {
            Node::Var(name) => {
                self.budget.step()?;
                let value = self.lookup(*name).unwrap_or_default();
                self.keep(&value);
                Ok(value)
            }
            Node::Const(value) => {
                self.budget.step()?;
                Ok(constant(value))
            }
            _ => {
                self.budget.down()?;
                let value = self.compute(expr).map_err(|e| e.at(expr.line))?;
                self.budget.up();
                Ok(value)
            }
        }
    }

    /// The value of an expression of which only a part is taken.
    fn base(&mut self, expr: &'r Expr) -> Result<Value<'r>, Error> {
        match &expr.node {
            Node::Var(name) => {
                self.budget.step()?;
                Ok(self.lookup(*name).unwrap_or_default())
            }
            _ => self.eval(expr),
        }
    }

    fn compute(&mut self, expr: &'r Expr) -> Result<Value<'r>, Error> {
        match &expr.node {
            Node::Var(_) | Node::Const(_) => self.eval(expr),
            Node::List(items) => self.list(items),
            Node::Map(entries) => self.dict(entries),
            Node::Not(operand) => {
                let value = self.eval(operand)?;
                Ok(Value::Bool(!self.truth(&value)))
            }
            Node::Neg(operand) => {
                let value = self.eval(operand)?;
                ops::negate(&value)
            }
            Node::And(operands) => {
                let left = self.eval(&operands[0])?;
                if self.truth(&left) { self.eval(&operands[1]) } else { Ok(left) }
            }
            Node::Or(operands) => {
                let left = self.eval(&operands[0])?;
                if self.truth(&left) { Ok(left) } else { self.eval(&operands[1]) }
            }
            Node::Binary(op, operands) => self.binary(*op, operands),
            Node::Compare(first, links) => self.chain(first, links),
            Node::If(parts) => self.choice(parts),
            Node::Filter(filter, input, args) => {
                let input = match input {
                    Some(input) => self.eval(input)?,
                    None => self.piped.pop().unwrap_or_default(),
                };
                let args = self.args(args)?;
                filter(self, input, args)
            }
            Node::Test(check, input, args) => {
                let input = self.eval(input)?;
                let args = self.args(args)?;
                check(self, &input, args).map(Value::Bool)
            }
            Node::Attr(base, name) => {
                let base = self.base(base)?;
                match self.attr(&base, name)? {
                    Some(value) => Ok(value),
                    None => missing(&base),
                }
            }
            Node::Item(parts) => {
                let base = self.base(&parts[0])?;
                let key = self.eval(&parts[1])?;
                match self.item(&base, &key)? {
                    Some(value) => Ok(value),
                    None => missing(&base),
                }
            }
            Node::Slice(parts) => self.slice(parts),
            Node::Call(callee, args) => self.call(callee, args, expr.line),
        }
    }

    fn list(&mut self, items: &'r [Expr]) -> Result<Value<'r>, Error> {
        let mut values = Vec::new();
        for item in items {
            let item = self.eval(item)?;
            value::push(&mut values, item, &self.budget)?;
        }
        Value::list(values, &self.budget)
    }

    fn dict(&mut self, entries: &'r [(Expr, Expr)]) -> Result<Value<'r>, Error> {
        let mut map = Map::with_room(entries.len(), &self.budget)?;
        for (key, value) in entries {
            let key = self.eval(key)?;
            let value = self.eval(value)?;
            map.insert(key, value, &self.budget)?;
        }
        Ok(Value::map(map))
    }

    fn binary(&mut self, op: Op, operands: &'r [Expr; 2]) -> Result<Value<'r>, Error> {
        let left = self.eval(&operands[0])?;
        let right = self.eval(&operands[1])?;
        match op {
            Op::Compare(how) => self.compare(how, &left, &right).map(Value::Bool),
            op => ops::calculate(self, op, &left, &right),
        }
    }

    fn chain(
        &mut self,
        first: &'r Expr,
        links: &'r [(Comparison, Expr, u32)],
    ) -> Result<Value<'r>, Error> {
        let mut left = self.eval(first)?;
        for (how, operand, line) in links {
            let right = self.eval(operand)?;
            if !self.compare(*how, &left, &right).map_err(|e| e.at(*line))? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    pub(crate) fn compare(
        &self,
        how: Comparison,
        left: &Value<'r>,
        right: &Value<'r>,
    ) -> Result<bool, Error> {
        Ok(match how {
            Comparison::Eq => self.equal(left, right)?,
            Comparison::Ne => !self.equal(left, right)?,
            Comparison::Lt => self.order(left, right)?.is_lt(),
            Comparison::Lte => self.order(left, right)?.is_le(),
            Comparison::Gt => self.order(left, right)?.is_gt(),
            Comparison::Gte => self.order(left, right)?.is_ge(),
            Comparison::In => ops::contains(self, right, left)?,
            Comparison::NotIn => !ops::contains(self, right, left)?,
        })
    }

    fn choice(&mut self, parts: &'r (Expr, Expr, Option<Expr>)) -> Result<Value<'r>, Error> {
        let (condition, then, otherwise) = parts;
        let condition = self.eval(condition)?;
        match (self.truth(&condition), otherwise) {
            (true, _) => self.eval(then),
            (false, Some(otherwise)) => self.eval(otherwise),
            (false, None) => Ok(Value::Undefined),
        }
    }

    fn slice(&mut self, parts: &'r (Expr, [Option<Expr>; 3])) -> Result<Value<'r>, Error> {
        let whole = self.eval(&parts.0)?;
        let mut bounds = [const { Value::None }; 3];
        for (bound, expr) in bounds.iter_mut().zip(&parts.1) {
            if let Some(expr) = expr {
                *bound = self.eval(expr)?;
            }
        }
        ops::slice(self, &whole, &bounds)
    }

    /// Evaluates the arguments of a call.
    pub(crate) fn args(&mut self, args: &'r tree::CallArgs) -> Result<Args<'r>, Error> {
        let mut values = Args::default();
        for (expr, splat) in &args.positional {
            let value = self.eval(expr)?;
            if *splat {
                let mut items = self.iterate(&value)?;
                while let Some(item) = items.next() {
                    value::push(&mut values.positional, item, &self.budget)?;
                }
            } else {
                value::push(&mut values.positional, value, &self.budget)?;
            }
        }
        if args.named.is_empty() && args.caller.is_none() {
            return Ok(values);
        }
        let mut named = Map::with_room(args.named.len() + 1, &self.budget)?;
        for (name, expr) in &args.named {
            let value = self.eval(expr)?;
            let Some(name) = name else {
                let kind = value.kind();
                let map = self.as_map(&value)?.ok_or_else(|| {
                    let why =
                        format!("attempted to apply keyword arguments from non map (got {kind})");
                    Error::invalid(why)
                })?;
                for (name, value) in map.iter() {
                    named.insert(name.clone(), value.clone(), &self.budget)?;
                }
                continue;
            };
            named.insert(Value::text(name), value, &self.budget)?;
        }
        if let Some(caller) = &args.caller {
            let caller = self.declare(caller)?;
            named.insert(Value::text("caller"), caller, &self.budget)?;
        }
        values.named = Some(named);
        Ok(values)
    }

    fn call(
        &mut self,
        callee: &'r Callee,
        args: &'r tree::CallArgs,
        line: u32,
    ) -> Result<Value<'r>, Error> {
        match callee {
            Callee::Name(name) => {
                let args = self.args(args)?;
                match self.lookup(*name) {
                    Some(Value::Loop(_)) => self.call_loop(args, line),
                    Some(callee) => self.call_value(&callee, args),
                    None => {
                        let why = format!("{} is unknown", self.program.names[*name]);
                        Err(Error::new(ErrorKind::UnknownFunction, why))
                    }
                }
            }
            Callee::Method(base, name) => {
                let base = self.base(base)?;
                let args = self.args(args)?;
                methods::call(self, &base, name, args)
            }
            Callee::Value(callee) => {
                let callee = self.eval(callee)?;
                let args = self.args(args)?;
                self.call_value(&callee, args)
            }
        }
    }

    fn call_loop(&mut self, args: Args<'r>, line: u32) -> Result<Value<'r>, Error> {
        let [value] = &args.all()?[..] else {
            return Err(Error::invalid("loop() takes one argument"));
        };
        self.capture()?;
        self.recurse(value, line)?;
        self.captured()
    }

    pub(crate) fn call_value(
        &mut self,
        callee: &Value<'r>,
        args: Args<'r>,
    ) -> Result<Value<'r>, Error> {
        match callee {
            Value::Macro(decl, closure) => self.call_macro(decl, *closure, args),
            Value::Function(function) => function.call(self, args),
            Value::Loop(_) => Err(Error::invalid("loop recursion cannot be called this way")),
            Value::List(_) | Value::Lazy(_) | Value::Map(_) | Value::Namespace(_) => {
                Err(Error::invalid("object is not callable"))
            }
            other => Err(Error::invalid(format!("value of type {} is not callable", other.kind()))),
        }
    }

    fn call_macro(
        &mut self,
        decl: &'r MacroDecl,
        closure: Option<usize>,
        args: Args<'r>,
    ) -> Result<Value<'r>, Error> {
        let Args { positional, mut named } = args;
        if positional.len() > decl.args.len() {
            return Err(ErrorKind::TooManyArguments.into());
        }
        let mut values = Vec::with_capacity(decl.args.len());
        let mut positional = positional.into_iter();
        for name in &decl.args {
            let name = &self.program.names[*name];
            let named = named.as_mut().and_then(|named| named.remove(name));
            values.push(match (positional.next(), named) {
                (Some(_), Some(_)) => {
                    let why = format!("duplicate argument `{name}`");
                    return Err(Error::new(ErrorKind::TooManyArguments, why));
                }
                (Some(value), None) | (None, Some(value)) => value,
                (None, None) => Value::Undefined,
            });
        }
        let mut caller = None;
        if decl.reads_caller {
            caller = Some(named.as_mut().and_then(|named| named.remove("caller")));
        }
        if let Some(name) = named.iter().flat_map(Map::iter).find_map(|(name, _)| name.as_text()) {
            let why = format!("unknown keyword argument `{}`", &*name.read());
            return Err(Error::new(ErrorKind::TooManyArguments, why));
        }
        self.budget.memory(values.capacity() * size_of::<Value<'_>>())?;
        self.run_macro(decl, closure, values, caller)
    }

    fn run_macro(
        &mut self,
        decl: &'r MacroDecl,
        closure: Option<usize>,
        mut values: Vec<Value<'r>>,
        caller: Option<Option<Value<'r>>>,
    ) -> Result<Value<'r>, Error> {
        let outer = self.enter_macro(closure)?;
        self.capture()?;
        if let Some(caller) = caller
            && let Some(name) = self.program.find("caller")
        {
            self.bind(name, caller.unwrap_or_default())?;
        }
        let mut defaults = decl.defaults.iter().rev();
        for name in decl.args.iter().rev() {
            let mut value = values.pop().unwrap_or_default();
            if let Some(default) = defaults.next()
                && value.is_undefined()
            {
                value = self.eval(default)?;
            }
            self.bind(*name, value)?;
        }
        self.run_body(&decl.body)?;
        self.leave_macro(outer);
        self.captured()
    }
}

/// Nothing of that name, which is a failure only where there is nothing at all.
fn missing<'r>(base: &Value<'r>) -> Result<Value<'r>, Error> {
    match base.is_undefined() {
        true => Err(ErrorKind::Undefined.into()),
        false => Ok(Value::Undefined),
    }
}

fn constant(value: &Const) -> Value<'_> {
    match value {
        Const::None => Value::None,
        Const::Bool(x) => Value::Bool(*x),
        Const::Int(x) => Value::int(*x),
        Const::Float(x) => Value::Float(*x),
        Const::Text(text) => Value::text(text),
    }
}
