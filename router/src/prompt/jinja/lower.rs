//! From the source of a template to what the engine runs. What the engine does not have is refused here, by name.
//!
//! `minijinja` parses. Lines are those that its code generator would attach to a failure, which is why nodes are visited
//! in its order: the line of an operator is that of the last operand begun before it.

mod expr;

use std::collections::{HashMap, HashSet};

use minijinja::machinery::ast::{self, CallType, Spanned};

use super::closure;
use super::tree::{For, MacroDecl, Name, Stmt, Target};

/// Statements and expressions inside each other, in the source. The parser has a limit of its own (150) for what it
/// recurses into; chains such as `a + b + c` are as deep as they are long.
const MAX_DEPTH: usize = 400;

/// Functions that minijinja has and that cost without bound.
const REFUSED_FUNCTIONS: [&str; 2] = ["debug", "super"];

/// What a template cannot be used for.
type Refusal = String;

#[derive(Default)]
pub(crate) struct Lowering<'a> {
    ids: HashMap<&'a str, Name>,
    names: Vec<Box<str>>,
    /// Names that the template itself gives a meaning to.
    assigned: HashSet<Name>,
    called: Vec<(&'a str, u32)>,
    line: u32,
    depth: usize,
}

impl<'a> Lowering<'a> {
    /// The statements of a template, and the names that they use.
    pub(crate) fn template(
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
        self.assigned.insert(id);
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
        Ok(Stmt::For(For {
            target,
            iter,
            filter,
            recursive: node.recursive,
            body,
            otherwise,
            line,
        }))
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
        let captures = found
            .into_iter()
            .filter(|name| *name != "caller")
            .map(|name| self.name(name))
            .collect();
        let name = self.assigned(node.name);
        Ok(MacroDecl { name, args, defaults, body, captures, reads_caller })
    }

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
}

fn refused(what: &str, line: u32) -> Refusal {
    format!(
        "it uses {what}, which chat templates do not need and whose cost cannot be bounded \
         (line {line} of the template)"
    )
}
