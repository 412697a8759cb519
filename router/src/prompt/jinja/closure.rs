//! Which names a macro takes along from where it is declared: those it reads before it assigns them, as minijinja decides.

use std::collections::HashSet;

use minijinja::machinery::ast::{CallArg, Expr, Macro, Stmt};

#[derive(Default)]
struct Tracker<'a> {
    out: Vec<&'a str>,
    assigned: Vec<HashSet<&'a str>>,
}

/// Names that `declared` reads and does not assign itself, in the order in which it reads them.
pub(crate) fn captures<'a>(declared: &Macro<'a>) -> Vec<&'a str> {
    let mut tracker = Tracker { out: Vec::new(), assigned: vec![HashSet::new()] };
    tracker.visit_macro(declared, false);
    tracker.out
}

impl<'a> Tracker<'a> {
    fn assign(&mut self, name: &'a str) {
        if let Some(names) = self.assigned.last_mut() {
            names.insert(name);
        }
    }

    fn scoped(&mut self, visit: impl FnOnce(&mut Self)) {
        self.assigned.push(HashSet::new());
        visit(self);
        self.assigned.pop();
    }

    fn visit_macro(&mut self, declared: &Macro<'a>, caller: bool) {
        if caller {
            self.assign("caller");
        }
        declared.args.iter().for_each(|arg| self.target(arg));
        declared.defaults.iter().for_each(|default| self.expr(default));
        self.all(&declared.body);
    }

    fn target(&mut self, target: &Expr<'a>) {
        match target {
            Expr::Var(var) => self.assign(var.id),
            Expr::List(list) => list.items.iter().for_each(|item| self.target(item)),
            // minijinja forgets it; a macro that only sets an attribute would not see its namespace.
            Expr::GetAttr(attr) => self.expr(&attr.expr),
            _ => {}
        }
    }

    fn args(&mut self, args: &[CallArg<'a>]) {
        for arg in args {
            let (CallArg::Pos(expr)
            | CallArg::Kwarg(_, expr)
            | CallArg::PosSplat(expr)
            | CallArg::KwargSplat(expr)) = arg;
            self.expr(expr);
        }
    }

    fn expr(&mut self, expr: &Expr<'a>) {
        match expr {
            Expr::Var(var) => {
                if !self.assigned.iter().any(|names| names.contains(var.id)) {
                    self.out.push(var.id);
                    self.assign(var.id);
                }
            }
            Expr::Const(_) => {}
            Expr::UnaryOp(e) => self.expr(&e.expr),
            Expr::BinOp(e) => {
                self.expr(&e.left);
                self.expr(&e.right);
            }
            Expr::Compare(e) => {
                self.expr(&e.expr);
                e.ops.iter().for_each(|op| self.expr(&op.expr));
            }
            Expr::IfExpr(e) => {
                self.expr(&e.test_expr);
                self.expr(&e.true_expr);
                e.false_expr.iter().for_each(|e| self.expr(e));
            }
            Expr::Filter(e) => {
                e.expr.iter().for_each(|e| self.expr(e));
                self.args(&e.args);
            }
            Expr::Test(e) => {
                self.expr(&e.expr);
                self.args(&e.args);
            }
            Expr::GetAttr(e) => self.expr(&e.expr),
            Expr::GetItem(e) => {
                self.expr(&e.expr);
                self.expr(&e.subscript_expr);
            }
            Expr::Slice(e) => {
                // minijinja forgets the sliced expression itself; a macro that only slices a name would not see it.
                self.expr(&e.expr);
                for bound in [&e.start, &e.stop, &e.step].into_iter().flatten() {
                    self.expr(bound);
                }
            }
            Expr::Call(e) => {
                self.expr(&e.expr);
                self.args(&e.args);
            }
            Expr::List(e) => e.items.iter().for_each(|e| self.expr(e)),
            Expr::Map(e) => {
                for (key, value) in e.keys.iter().zip(&e.values) {
                    self.expr(key);
                    self.expr(value);
                }
            }
        }
    }

    fn all(&mut self, body: &[Stmt<'a>]) {
        body.iter().for_each(|stmt| self.stmt(stmt));
    }

    fn stmt(&mut self, stmt: &Stmt<'a>) {
        match stmt {
            Stmt::EmitExpr(s) => self.expr(&s.expr),
            Stmt::ForLoop(s) => {
                self.scoped(|t| {
                    t.assign("loop");
                    t.expr(&s.iter);
                    t.target(&s.target);
                    s.filter_expr.iter().for_each(|e| t.expr(e));
                    t.all(&s.body);
                });
                self.scoped(|t| t.all(&s.else_body));
            }
            Stmt::IfCond(s) => {
                self.expr(&s.expr);
                self.scoped(|t| t.all(&s.true_body));
                self.scoped(|t| t.all(&s.false_body));
            }
            Stmt::WithBlock(s) => self.scoped(|t| {
                for (target, expr) in &s.assignments {
                    t.target(target);
                    t.expr(expr);
                }
                t.all(&s.body);
            }),
            Stmt::Set(s) => {
                self.target(&s.target);
                self.expr(&s.expr);
            }
            Stmt::SetBlock(s) => {
                self.target(&s.target);
                self.scoped(|t| t.all(&s.body));
                s.filter.iter().for_each(|e| self.expr(e));
            }
            Stmt::FilterBlock(s) => {
                self.scoped(|t| t.all(&s.body));
                self.expr(&s.filter);
            }
            Stmt::Macro(s) => {
                self.assign(s.name);
                self.scoped(|t| t.visit_macro(s, true));
            }
            Stmt::CallBlock(s) => {
                self.expr(&s.call.expr);
                self.args(&s.call.args);
                self.scoped(|t| t.visit_macro(&s.macro_decl, true));
            }
            Stmt::Do(s) => {
                self.expr(&s.call.expr);
                self.args(&s.call.args);
            }
            // Without names, or refused when the template is read.
            _ => {}
        }
    }
}
