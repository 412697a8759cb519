//! Runs the statements of a template.

use super::budget::Budget;
use super::error::{Error, ErrorKind};
use super::scope::{Iter, Machine};
use super::tree::{For, MacroDecl, Stmt, Target};
use super::value::print;
use super::value::{self, Value};

/// Where a statement goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    Next,
    Continue,
    Break,
}

impl<'r> Machine<'r> {
    /// Runs the whole template.
    pub(crate) fn run(&mut self) -> Result<(), Error> {
        let program = self.program;
        self.body(&program.body).map(|_| ())
    }

    fn body(&mut self, body: &'r [Stmt]) -> Result<Flow, Error> {
        for stmt in body {
            let flow = match stmt {
                Stmt::Raw(text) => {
                    self.budget.step()?;
                    self.write(text)?;
                    Flow::Next
                }
                _ => {
                    self.budget.down()?;
                    let flow = self.stmt(stmt)?;
                    self.budget.up();
                    flow
                }
            };
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn stmt(&mut self, stmt: &'r Stmt) -> Result<Flow, Error> {
        match stmt {
            Stmt::Raw(text) => self.write(text)?,
            Stmt::Emit(expr) => {
                let value = self.eval(expr)?;
                self.emit(&value).map_err(|e| e.at(expr.line))?;
            }
            Stmt::Recurse(arg, line) => {
                let value = self.eval(arg)?;
                self.recurse(&value, *line)?;
            }
            Stmt::For(decl) => self.for_loop(decl)?,
            Stmt::If(branches, otherwise) => {
                for (condition, body) in branches {
                    let condition = self.eval(condition)?;
                    if self.truth(&condition) {
                        return self.body(body);
                    }
                }
                return self.body(otherwise);
            }
            Stmt::With(assignments, body) => {
                self.push_frame()?;
                for (target, expr) in assignments {
                    let value = self.eval(expr)?;
                    self.assign(target, value)?;
                }
                let flow = self.body(body)?;
                self.pop_frame();
                return Ok(flow);
            }
            Stmt::Set(target, expr) => {
                let value = self.eval(expr)?;
                self.assign(target, value)?;
            }
            Stmt::SetBlock(target, filter, body) => {
                let flow = self.captured_body(body)?;
                let mut value = self.captured()?;
                if let Some(filter) = filter {
                    self.piped.push(value);
                    value = self.eval(filter)?;
                }
                self.assign(target, value)?;
                return Ok(flow);
            }
            Stmt::FilterBlock(filter, body) => {
                let flow = self.captured_body(body)?;
                let value = self.captured()?;
                self.piped.push(value);
                let value = self.eval(filter)?;
                self.emit(&value).map_err(|e| e.at(filter.line))?;
                return Ok(flow);
            }
            Stmt::Macro(decl) => {
                let value = self.declare(decl)?;
                self.bind(decl.name, value)?;
            }
            Stmt::Do(call) => {
                self.eval(call)?;
            }
            Stmt::Continue => return Ok(Flow::Continue),
            Stmt::Break => return Ok(Flow::Break),
        }
        Ok(Flow::Next)
    }

    /// Runs the body of a macro.
    pub(crate) fn run_body(&mut self, body: &'r [Stmt]) -> Result<(), Error> {
        self.body(body).map(|_| ())
    }

    fn captured_body(&mut self, body: &'r [Stmt]) -> Result<Flow, Error> {
        self.capture()?;
        self.body(body)
    }

    /// Writes a value as Python prints it.
    fn emit(&mut self, value: &Value<'r>) -> Result<(), Error> {
        match value.as_text() {
            Some(text) => self.write(&text.read()),
            None => {
                let text = print::python(self, value)?;
                self.write(&text.read())
            }
        }
    }

    pub(crate) fn declare(&mut self, decl: &'r MacroDecl) -> Result<Value<'r>, Error> {
        let closure = self.capture_names(&decl.captures)?;
        Ok(Value::Macro(decl, closure))
    }

    pub(crate) fn assign(&mut self, target: &'r Target, value: Value<'r>) -> Result<(), Error> {
        match target {
            Target::Name(name) => self.bind(*name, value),
            Target::List(targets, line) => {
                let items = self.unpack(&value, targets.len()).map_err(|e| e.at(*line))?;
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item)?;
                }
                Ok(())
            }
            Target::Attr(base, name, line) => {
                let base = self.eval(base)?;
                let Value::Namespace(id) = base else {
                    let kind = base.kind();
                    let why = format!("can only assign to namespaces, not {kind}");
                    return Err(Error::invalid(why).at(*line));
                };
                self.set_field(id, name, value).map_err(|e| e.at(*line))
            }
        }
    }

    fn unpack(&self, value: &Value<'r>, count: usize) -> Result<Vec<Value<'r>>, Error> {
        let mut iter = match value {
            Value::Text(_) => None,
            value if value.is_missing() => None,
            value => self.iter(value)?,
        }
        .ok_or_else(|| Error::new(ErrorKind::CannotUnpack, "value is not iterable"))?;
        let items = all(&mut iter, &self.budget)?;
        if items.len() != count {
            let got = items.len();
            let why = format!("sequence of wrong length (expected {count}, got {got})");
            return Err(Error::new(ErrorKind::CannotUnpack, why));
        }
        Ok(items)
    }

    fn for_loop(&mut self, decl: &'r For) -> Result<(), Error> {
        let value = self.eval(&decl.iter)?;
        if !self.loop_over(decl, &value, decl.line)? {
            self.body(&decl.otherwise)?;
        }
        Ok(())
    }

    /// Runs a loop over `value`; true if it had an item.
    fn loop_over(&mut self, decl: &'r For, value: &Value<'r>, line: u32) -> Result<bool, Error> {
        let mut iter = self.iterate(value).map_err(|e| e.at(line))?;
        if let Some(filter) = &decl.filter {
            let mut kept = Vec::new();
            let id = self.push_loop(iter, None)?;
            while let Some(item) = self.next_item(id, false)? {
                self.assign(&decl.target, item.clone())?;
                let passes = self.eval(filter)?;
                if self.truth(&passes) {
                    value::push(&mut kept, item, &self.budget)?;
                }
            }
            self.pop_loop(id);
            iter = Iter::Items(value::List::new(kept, &self.budget)?, 0);
        }
        let id = self.push_loop(iter, Some(decl))?;
        let mut any = false;
        while let Some(item) = self.next_item(id, true)? {
            any = true;
            self.assign(&decl.target, item)?;
            if self.body(&decl.body)? == Flow::Break {
                break;
            }
        }
        self.pop_loop(id);
        Ok(any)
    }

    /// `loop(value)`: the innermost loop, if it is a recursive one, once more over `value`.
    pub(crate) fn recurse(&mut self, value: &Value<'r>, line: u32) -> Result<(), Error> {
        let Some((_, decl)) = self.running.last() else {
            return Err(Error::new(ErrorKind::UnknownFunction, "loop is unknown").at(line));
        };
        let Some(decl) = decl.filter(|decl| decl.recursive) else {
            return Err(Error::invalid("cannot recurse outside of recursive loop").at(line));
        };
        if self.iter(value)?.is_none() {
            let why = "cannot recurse because of non-iterable value";
            return Err(Error::invalid(why).at(line));
        }
        self.loop_over(decl, value, line).map(|_| ())
    }

    /// Items of a value, or the failure that it has none.
    pub(crate) fn iterate(&self, value: &Value<'r>) -> Result<Iter<'r>, Error> {
        match self.iter(value)? {
            Some(iter) => Ok(iter),
            None => Err(Error::invalid(format!("{} is not iterable", value.kind()))),
        }
    }

    /// Items of a value; missing values have none.
    pub(crate) fn iter(&self, value: &Value<'r>) -> Result<Option<Iter<'r>>, Error> {
        Ok(match value {
            Value::Undefined | Value::None => Some(Iter::None),
            Value::Text(text) => Some(Iter::Chars(text.clone(), 0)),
            Value::List(list) | Value::Lazy(list) => Some(Iter::Items(list.clone(), 0)),
            Value::Map(_) | Value::Namespace(_) | Value::Loop(_) | Value::Macro(..) => {
                self.as_map(value)?.map(|map| Iter::Keys(map, 0))
            }
            Value::Bool(_) | Value::Int(_) | Value::Float(_) | Value::Function(_) => None,
        })
    }
}

/// All the items that are left.
pub(crate) fn all<'r>(iter: &mut Iter<'r>, budget: &Budget) -> Result<Vec<Value<'r>>, Error> {
    let mut items = match iter {
        Iter::Items(list, at) => value::collect(std::iter::empty(), list.len() - *at, budget)?,
        Iter::Keys(map, at) => value::collect(std::iter::empty(), map.len() - *at, budget)?,
        Iter::Chars(..) | Iter::None => Vec::new(),
    };
    while let Some(item) = iter.next() {
        value::push(&mut items, item, budget)?;
    }
    Ok(items)
}
