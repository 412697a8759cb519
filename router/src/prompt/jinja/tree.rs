//! A template as the engine runs it: names are numbers, filters and tests are functions, every node knows its line.

use super::library::checks::Check;
use super::library::filters::Filter;

/// A name of the template: an index into [`Program::names`](super::Program).
pub(crate) type Name = usize;

#[derive(Debug)]
pub(crate) enum Stmt {
    Raw(Box<str>),
    Emit(Expr),
    /// `{{ loop(x) }}`: goes on with the innermost recursive loop, and writes where it stands.
    Recurse(Expr, u32),
    For(For),
    If(Vec<(Expr, Vec<Stmt>)>, Vec<Stmt>),
    With(Vec<(Target, Expr)>, Vec<Stmt>),
    Set(Target, Expr),
    /// What the body writes, through a chain of filters, becomes a value.
    SetBlock(Target, Option<Expr>, Vec<Stmt>),
    FilterBlock(Expr, Vec<Stmt>),
    Macro(MacroDecl),
    Do(Expr),
    Continue,
    Break,
}

#[derive(Debug)]
pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) iter: Expr,
    pub(crate) filter: Option<Expr>,
    pub(crate) recursive: bool,
    pub(crate) body: Vec<Stmt>,
    pub(crate) otherwise: Vec<Stmt>,
    /// Where `iter` turns out not to be iterable.
    pub(crate) line: u32,
}

#[derive(Debug)]
pub(crate) struct MacroDecl {
    pub(crate) name: Name,
    pub(crate) args: Vec<Name>,
    /// Of the last arguments.
    pub(crate) defaults: Vec<Expr>,
    pub(crate) body: Vec<Stmt>,
    /// Names that it takes along from where it is declared.
    pub(crate) captures: Vec<Name>,
    pub(crate) reads_caller: bool,
}

#[derive(Debug)]
pub(crate) enum Target {
    Name(Name),
    List(Vec<Target>, u32),
    Attr(Expr, Box<str>, u32),
}

/// An expression and the line that its failures name.
#[derive(Debug)]
pub(crate) struct Expr {
    pub(crate) node: Node,
    pub(crate) line: u32,
}

#[derive(Debug)]
pub(crate) enum Node {
    Var(Name),
    Const(Const),
    List(Vec<Expr>),
    Map(Vec<(Expr, Expr)>),
    Not(Box<Expr>),
    Neg(Box<Expr>),
    And(Box<[Expr; 2]>),
    Or(Box<[Expr; 2]>),
    Binary(Op, Box<[Expr; 2]>),
    /// `a < b <= c`: operator, operand and line of each link.
    Compare(Box<Expr>, Vec<(Comparison, Expr, u32)>),
    /// Condition, then, else.
    If(Box<(Expr, Expr, Option<Expr>)>),
    /// `None` is fed with what a block wrote.
    Filter(Filter, Option<Box<Expr>>, CallArgs),
    Test(Check, Box<Expr>, CallArgs),
    Attr(Box<Expr>, Box<str>),
    Item(Box<[Expr; 2]>),
    /// Whole, start, stop, step.
    Slice(Box<(Expr, [Option<Expr>; 3])>),
    Call(Callee, CallArgs),
}

#[derive(Debug)]
pub(crate) enum Callee {
    Name(Name),
    Method(Box<Expr>, Box<str>),
    Value(Box<Expr>),
}

#[derive(Debug, Default)]
pub(crate) struct CallArgs {
    /// Each with whether it is a splat.
    pub(crate) positional: Vec<(Expr, bool)>,
    /// A splat has no name.
    pub(crate) named: Vec<(Option<Box<str>>, Expr)>,
    /// The body of a call block.
    pub(crate) caller: Option<Box<MacroDecl>>,
}

#[derive(Debug)]
pub(crate) enum Const {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Box<str>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Rem,
    Pow,
    Concat,
    Compare(Comparison),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comparison {
    Eq,
    Ne,
    Lt,
    Lte,
    Gt,
    Gte,
    In,
    NotIn,
}
