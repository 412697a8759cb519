//! Expressions of the source, as the engine runs them.

use minijinja::machinery::ast::{self, CallType, Spanned};

use super::{Lowering, Refusal, refused};
use crate::prompt::jinja::library::checks;
use crate::prompt::jinja::library::filters;
use crate::prompt::jinja::tree::{CallArgs, Callee, Comparison, Const, Expr, Node, Op};

impl<'a> Lowering<'a> {
    pub(crate) fn optional(
        &mut self,
        expr: Option<&ast::Expr<'a>>,
    ) -> Result<Option<Expr>, Refusal> {
        expr.map(|expr| self.expr(expr)).transpose()
    }

    fn boxed(&mut self, expr: &ast::Expr<'a>) -> Result<Box<Expr>, Refusal> {
        Ok(Box::new(self.expr(expr)?))
    }

    pub(crate) fn expr(&mut self, expr: &ast::Expr<'a>) -> Result<Expr, Refusal> {
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
                let operands = Box::new([self.expr(&binary.left)?, self.expr(&binary.right)?]);
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

    pub(crate) fn call(
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
    ) -> Result<CallArgs, Refusal> {
        let mut lowered = CallArgs::default();
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

fn unknown(what: &str, name: &str, line: u32) -> Refusal {
    match filters::REFUSED.contains(&name) {
        true => refused(&format!("the {what} `{name}`"), line),
        false => format!("unknown {what}: {what} {name} is unknown (line {line} of the template)"),
    }
}
