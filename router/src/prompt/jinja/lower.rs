//! From the source of a template to what the engine runs. What the engine does not have is refused here, by name.
//!
//! `minijinja` parses. Lines are those that its code generator would attach to a failure, which is why nodes are visited
//! in its order: the line of an operator is that of the last operand begun before it.

use std::collections::HashMap;

use minijinja::machinery::ast::{self, CallType, Spanned};

use super::checks::{self};
use super::closure;
use super::filters;
use super::tree::{
    Args, Callee, Comparison, Const, Expr, For, MacroDecl, Name, Node, Op, Stmt, Target,
};

/// Statements and expressions inside each other, in the source. The parser has a limit of its own (150) for what it
/// recurses into; chains such as `a + b + c` are as deep as they are long.
const MAX_DEPTH: usize = 400;

/// Functions that minijinja has and that cost without bound.
const REFUSED_FUNCTIONS: [&str; 2] = ["debug", "super"];

/// What a template cannot be used for.
type Refusal = String;

#[derive(Default)]
pub(super) struct Lowering<'a> {
    ids: HashMap<&'a str, Name>,
    names: Vec<Box<str>>,
    /// Names that the template itself gives a meaning to.
    assigned: Vec<Name>,
    called: Vec<(&'a str, u32)>,
    line: u32,
    depth: usize,
}

impl<'a> Lowering<'a> {
    /// The statements of a template, and the names that they use.
    pub(super) fn template(
        mut self,
        root: &ast::Stmt<'a>,
    ) -> Result<(Vec<Stmt>, Vec<Box<str>>), Refusal> {
        let ast::Stmt::Template(template) = root else {
            return Err("the parser returned no template".to_owned());
        };
        self.line = template.span().start_line.into();
        let body = self.body(&template.children)?;
        for (name, line) in &self.called {
            let ours = self.ids.get(name).is_some_and(|id| self.assigned.contains(id));
            if !ours && REFUSED_FUNCTIONS.contains(name) {
                return Err(refused(&format!("the function `{name}`"), *line));
            }
        }
        Ok((body, self.names))
    }

    fn name(&mut self, name: &'a str) -> Name {
        *self.ids.entry(name).or_insert_with(|| {
            self.names.push(name.into());
            self.names.len() - 1
        })
    }

    fn assigned(&mut self, name: &'a str) -> Name {
        let id = self.name(name);
        if !self.assigned.contains(&id) {
            self.assigned.push(id);
        }
        id
    }

    fn at<T>(&mut self, node: &Spanned<T>) {
        self.line = node.span().start_line.into();
    }

    fn deeper(&mut self) -> Result<(), Refusal> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            let line = self.line;
            return Err(format!(
                "it is nested in more than {MAX_DEPTH} levels (line {line} of the template)"
            ));
        }
        Ok(())
    }

    fn body(&mut self, body: &[ast::Stmt<'a>]) -> Result<Vec<Stmt>, Refusal> {
        body.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    fn stmt(&mut self, stmt: &ast::Stmt<'a>) -> Result<Stmt, Refusal> {
        self.deeper()?;
        let lowered = self.stmt_inside(stmt)?;
        self.depth -= 1;
        Ok(lowered)
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "a newer parser may know more")]
    fn stmt_inside(&mut self, stmt: &ast::Stmt<'a>) -> Result<Stmt, Refusal> {
        let refuse = |what: &str, line: u16| Err(refused(what, line.into()));
        match stmt {
            ast::Stmt::EmitExpr(emit) => self.emit(&emit.expr),
            ast::Stmt::EmitRaw(raw) => {
                self.at(raw);
                Ok(Stmt::Raw(raw.raw.into()))
            }
            ast::Stmt::ForLoop(node) => self.for_loop(node),
            ast::Stmt::IfCond(node) => self.if_cond(node),
            ast::Stmt::WithBlock(node) => {
                self.at(node);
                let mut assignments = Vec::new();
                for (target, expr) in &node.assignments {
                    let expr = self.expr(expr)?;
                    assignments.push((self.target(target)?, expr));
                }
                Ok(Stmt::With(assignments, self.body(&node.body)?))
            }
            ast::Stmt::Set(node) => {
                self.at(node);
                let expr = self.expr(&node.expr)?;
                Ok(Stmt::Set(self.target(&node.target)?, expr))
            }
            ast::Stmt::SetBlock(node) => {
                self.at(node);
                let body = self.body(&node.body)?;
                let filter = self.optional(node.filter.as_ref())?;
                Ok(Stmt::SetBlock(self.target(&node.target)?, filter, body))
            }
            ast::Stmt::FilterBlock(node) => {
                self.at(node);
                let body = self.body(&node.body)?;
                Ok(Stmt::FilterBlock(self.expr(&node.filter)?, body))
            }
            ast::Stmt::Macro(node) => Ok(Stmt::Macro(self.declared(node)?)),
            ast::Stmt::CallBlock(node) => {
                Ok(Stmt::Emit(self.call(&node.call, Some(&node.macro_decl))?))
            }
            ast::Stmt::Continue(node) => {
                self.at(node);
                Ok(Stmt::Continue)
            }
            ast::Stmt::Break(node) => {
                self.at(node);
                Ok(Stmt::Break)
            }
            ast::Stmt::Do(node) => Ok(Stmt::Do(self.call(&node.call, None)?)),
            ast::Stmt::AutoEscape(node) => refuse("`autoescape`", node.span().start_line),
            ast::Stmt::Block(node) => refuse("`block`", node.span().start_line),
            ast::Stmt::Import(node) => refuse("`import`", node.span().start_line),
            ast::Stmt::FromImport(node) => refuse("`from ... import`", node.span().start_line),
            ast::Stmt::Extends(node) => refuse("`extends`", node.span().start_line),
            ast::Stmt::Include(node) => refuse("`include`", node.span().start_line),
            _ => Err(refused("a statement of a newer parser", self.line)),
        }
    }

    fn emit(&mut self, expr: &ast::Expr<'a>) -> Result<Stmt, Refusal> {
        self.line = expr.span().start_line.into();
        if let ast::Expr::Call(call) = expr
            && let (CallType::Function("loop"), [arg]) = (call.identify_call(), &call.args[..])
            && let ast::CallArg::Pos(arg) = arg
        {
            let arg = self.expr(arg)?;
            return Ok(Stmt::Recurse(arg, call.span().start_line.into()));
        }
        Ok(Stmt::Emit(self.expr(expr)?))
    }

    fn for_loop(&mut self, node: &Spanned<ast::ForLoop<'a>>) -> Result<Stmt, Refusal> {
        self.at(node);
        let (iter, filter, target, line);
        match &node.filter_expr {
            Some(condition) => {
                self.line = condition.span().start_line.into();
                iter = self.expr(&node.iter)?;
                line = self.line;
                self.target(&node.target)?;
                filter = Some(self.expr(condition)?);
                target = self.target(&node.target)?;
            }
            None => {
                self.line = node.iter.span().start_line.into();
                iter = self.expr(&node.iter)?;
                line = self.line;
                filter = None;
                target = self.target(&node.target)?;
            }
        }
        let body = self.body(&node.body)?;
        let otherwise = self.body(&node.else_body)?;
        Ok(Stmt::For(For { target, iter, filter, recursive: node.recursive, body, otherwise, line }))
    }

    /// Chains of `elif` are nested in the source, and a list here.
    fn if_cond(&mut self, node: &Spanned<ast::IfCond<'a>>) -> Result<Stmt, Refusal> {
        let mut branches = Vec::new();
        let mut node = node;
        loop {
            self.at(node);
            self.line = node.expr.span().start_line.into();
            let condition = self.expr(&node.expr)?;
            branches.push((condition, self.body(&node.true_body)?));
            match &node.false_body[..] {
                [ast::Stmt::IfCond(next)] => node = next,
                otherwise => return Ok(Stmt::If(branches, self.body(otherwise)?)),
            }
        }
    }

    fn declared(&mut self, node: &Spanned<ast::Macro<'a>>) -> Result<MacroDecl, Refusal> {
        self.at(node);
        let mut args = Vec::new();
        for arg in &node.args {
            let ast::Expr::Var(var) = arg else {
                return Err(refused("an argument that is no name", self.line));
            };
            args.push(self.assigned(var.id));
        }
        let mut defaults = Vec::new();
        for default in node.defaults.iter().rev() {
            defaults.push(self.expr(default)?);
        }
        defaults.reverse();
        let body = self.body(&node.body)?;
        let found = closure::captures(node);
        let reads_caller = found.contains(&"caller");
        let captures =
            found.into_iter().filter(|name| *name != "caller").map(|name| self.name(name)).collect();
        let name = self.assigned(node.name);
        Ok(MacroDecl { name, args, defaults, body, captures, reads_caller })
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "the parser makes no other targets")]
    fn target(&mut self, target: &ast::Expr<'a>) -> Result<Target, Refusal> {
        match target {
            ast::Expr::Var(var) => Ok(Target::Name(self.assigned(var.id))),
            ast::Expr::List(list) => {
                self.deeper()?;
                self.at(list);
                let line = self.line;
                let items = list.items.iter().map(|item| self.target(item));
                let items = items.collect::<Result<_, _>>()?;
                self.depth -= 1;
                Ok(Target::List(items, line))
            }
            ast::Expr::GetAttr(attr) => {
                self.at(attr);
                let base = self.expr(&attr.expr)?;
                Ok(Target::Attr(base, attr.name.into(), self.line))
            }
            _ => Err(refused("this assignment", self.line)),
        }
    }

    fn optional(&mut self, expr: Option<&ast::Expr<'a>>) -> Result<Option<Expr>, Refusal> {
        expr.map(|expr| self.expr(expr)).transpose()
    }

    fn boxed(&mut self, expr: &ast::Expr<'a>) -> Result<Box<Expr>, Refusal> {
        Ok(Box::new(self.expr(expr)?))
    }

    fn expr(&mut self, expr: &ast::Expr<'a>) -> Result<Expr, Refusal> {
        self.deeper()?;
        let lowered = self.expr_inside(expr)?;
        self.depth -= 1;
        Ok(lowered)
    }

    fn expr_inside(&mut self, expr: &ast::Expr<'a>) -> Result<Expr, Refusal> {
        let node = match expr {
            ast::Expr::Var(var) => {
                self.at(var);
                Node::Var(self.name(var.id))
            }
            ast::Expr::Const(value) => {
                self.at(value);
                Node::Const(constant(&value.value).ok_or_else(|| {
                    refused("a constant that is no text and no number of 128 bits", self.line)
                })?)
            }
            ast::Expr::Slice(slice) => {
                self.at(slice);
                let whole = self.expr(&slice.expr)?;
                let start = self.optional(slice.start.as_ref())?;
                let stop = self.optional(slice.stop.as_ref())?;
                let step = self.optional(slice.step.as_ref())?;
                Node::Slice(Box::new((whole, [start, stop, step])))
            }
            ast::Expr::UnaryOp(unary) => {
                self.at(unary);
                match unary.op {
                    ast::UnaryOpKind::Not => Node::Not(self.boxed(&unary.expr)?),
                    ast::UnaryOpKind::Neg => {
                        let operand = self.boxed(&unary.expr)?;
                        self.at(unary);
                        Node::Neg(operand)
                    }
                }
            }
            ast::Expr::BinOp(binary) => {
                self.at(binary);
                let operands =
                    Box::new([self.expr(&binary.left)?, self.expr(&binary.right)?]);
                operation(binary.op, operands)
            }
            ast::Expr::Compare(chain) => {
                self.at(chain);
                let first = self.boxed(&chain.expr)?;
                let mut links = Vec::new();
                for link in &chain.ops {
                    let operand = self.expr(&link.expr)?;
                    links.push((comparison(link.op), operand, self.line));
                }
                Node::Compare(first, links)
            }
            ast::Expr::IfExpr(choice) => {
                self.at(choice);
                let condition = self.expr(&choice.test_expr)?;
                let then = self.expr(&choice.true_expr)?;
                let otherwise = self.optional(choice.false_expr.as_ref())?;
                Node::If(Box::new((condition, then, otherwise)))
            }
            ast::Expr::Filter(filter) => {
                self.at(filter);
                let Some(function) = filters::by_name(filter.name) else {
                    return Err(unknown("filter", filter.name, self.line));
                };
                let input = self.optional(filter.expr.as_ref())?.map(Box::new);
                Node::Filter(function, input, self.args(&filter.args, None)?)
            }
            ast::Expr::Test(test) => {
                self.at(test);
                let Some(function) = checks::by_name(test.name) else {
                    return Err(unknown("test", test.name, self.line));
                };
                let input = self.boxed(&test.expr)?;
                Node::Test(function, input, self.args(&test.args, None)?)
            }
            ast::Expr::GetAttr(attr) => {
                self.at(attr);
                Node::Attr(self.boxed(&attr.expr)?, attr.name.into())
            }
            ast::Expr::GetItem(item) => {
                self.at(item);
                let whole = self.expr(&item.expr)?;
                Node::Item(Box::new([whole, self.expr(&item.subscript_expr)?]))
            }
            ast::Expr::Call(call) => return self.call(call, None),
            ast::Expr::List(list) => {
                self.at(list);
                let line = self.line;
                let items = list.items.iter().map(|item| self.expr(item));
                let items = items.collect::<Result<_, _>>()?;
                if list.as_const().is_some() {
                    self.line = line;
                }
                Node::List(items)
            }
            ast::Expr::Map(map) => {
                self.at(map);
                let line = self.line;
                let mut entries = Vec::new();
                for (key, value) in map.keys.iter().zip(&map.values) {
                    entries.push((self.expr(key)?, self.expr(value)?));
                }
                if map.as_const().is_some() {
                    self.line = line;
                }
                Node::Map(entries)
            }
        };
        Ok(Expr { node, line: self.line })
    }

    fn call(
        &mut self,
        call: &Spanned<ast::Call<'a>>,
        caller: Option<&Spanned<ast::Macro<'a>>>,
    ) -> Result<Expr, Refusal> {
        self.at(call);
        let callee = match call.identify_call() {
            CallType::Function(name) => {
                self.called.push((name, self.line));
                Callee::Name(self.name(name))
            }
            CallType::Method(base, name) => Callee::Method(self.boxed(base)?, name.into()),
            CallType::Block(_) => return Err(refused("`self`", self.line)),
            CallType::Object(callee) => Callee::Value(self.boxed(callee)?),
        };
        let args = self.args(&call.args, caller)?;
        Ok(Expr { node: Node::Call(callee, args), line: self.line })
    }

    fn args(
        &mut self,
        args: &[ast::CallArg<'a>],
        caller: Option<&Spanned<ast::Macro<'a>>>,
    ) -> Result<Args, Refusal> {
        let mut lowered = Args::default();
        for arg in args {
            match arg {
                ast::CallArg::Pos(expr) => lowered.positional.push((self.expr(expr)?, false)),
                ast::CallArg::PosSplat(expr) => lowered.positional.push((self.expr(expr)?, true)),
                ast::CallArg::Kwarg(..) | ast::CallArg::KwargSplat(_) => {}
            }
        }
        let fixed = |arg: &ast::CallArg<'a>| match arg {
            ast::CallArg::Kwarg(_, expr) => matches!(expr, ast::Expr::Const(_)),
            ast::CallArg::Pos(_) | ast::CallArg::PosSplat(_) => true,
            ast::CallArg::KwargSplat(_) => false,
        };
        let line = (caller.is_none() && args.iter().all(fixed)).then_some(self.line);
        for arg in args {
            match arg {
                ast::CallArg::Kwarg(name, expr) => {
                    lowered.named.push((Some((*name).into()), self.expr(expr)?));
                }
                ast::CallArg::KwargSplat(expr) => lowered.named.push((None, self.expr(expr)?)),
                ast::CallArg::Pos(_) | ast::CallArg::PosSplat(_) => {}
            }
        }
        self.line = line.unwrap_or(self.line);
        if let Some(caller) = caller {
            lowered.caller = Some(Box::new(self.declared(caller)?));
        }
        Ok(lowered)
    }
}

fn operation(op: ast::BinOpKind, operands: Box<[Expr; 2]>) -> Node {
    let op = match op {
        ast::BinOpKind::ScAnd => return Node::And(operands),
        ast::BinOpKind::ScOr => return Node::Or(operands),
        ast::BinOpKind::Add => Op::Add,
        ast::BinOpKind::Sub => Op::Sub,
        ast::BinOpKind::Mul => Op::Mul,
        ast::BinOpKind::Div => Op::Div,
        ast::BinOpKind::FloorDiv => Op::FloorDiv,
        ast::BinOpKind::Rem => Op::Rem,
        ast::BinOpKind::Pow => Op::Pow,
        ast::BinOpKind::Concat => Op::Concat,
        ast::BinOpKind::Eq => Op::Compare(Comparison::Eq),
        ast::BinOpKind::Ne => Op::Compare(Comparison::Ne),
        ast::BinOpKind::Lt => Op::Compare(Comparison::Lt),
        ast::BinOpKind::Lte => Op::Compare(Comparison::Lte),
        ast::BinOpKind::Gt => Op::Compare(Comparison::Gt),
        ast::BinOpKind::Gte => Op::Compare(Comparison::Gte),
        ast::BinOpKind::In => Op::Compare(Comparison::In),
    };
    Node::Binary(op, operands)
}

fn comparison(op: ast::CompareOpKind) -> Comparison {
    match op {
        ast::CompareOpKind::Eq => Comparison::Eq,
        ast::CompareOpKind::Ne => Comparison::Ne,
        ast::CompareOpKind::Lt => Comparison::Lt,
        ast::CompareOpKind::Lte => Comparison::Lte,
        ast::CompareOpKind::Gt => Comparison::Gt,
        ast::CompareOpKind::Gte => Comparison::Gte,
        ast::CompareOpKind::In => Comparison::In,
        ast::CompareOpKind::NotIn => Comparison::NotIn,
    }
}

fn constant(value: &minijinja::Value) -> Option<Const> {
    use minijinja::value::ValueKind;
    let kind = value.kind();
    Some(if let Some(text) = value.as_str() {
        Const::Text(text.into())
    } else if kind == ValueKind::None {
        Const::None
    } else if kind == ValueKind::Bool {
        Const::Bool(value.is_true())
    } else if value.is_integer() {
        Const::Int(i128::try_from(value.clone()).ok()?)
    } else if kind == ValueKind::Number {
        Const::Float(f64::try_from(value.clone()).ok()?)
    } else {
        return None;
    })
}

fn refused(what: &str, line: u32) -> Refusal {
    format!(
        "it uses {what}, which chat templates do not need and whose cost cannot be bounded \
         (line {line} of the template)"
    )
}

fn unknown(what: &str, name: &str, line: u32) -> Refusal {
    match filters::REFUSED.contains(&name) {
        true => refused(&format!("the {what} `{name}`"), line),
        false => format!("unknown {what}: {what} {name} is unknown (line {line} of the template)"),
    }
}
