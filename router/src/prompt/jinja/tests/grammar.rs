//! Random templates: every statement and operation that templates have, over values of every kind.

/// Where choices come from. When they run out, the first and smallest is made.
pub(crate) struct Choices<'a> {
    left: std::slice::Iter<'a, u16>,
    /// Whether templates may grow what they have without end.
    pub(crate) wild: bool,
}

impl<'a> Choices<'a> {
    pub(crate) fn new(choices: &'a [u16], wild: bool) -> Self {
        Self { left: choices.iter(), wild }
    }

    fn below(&mut self, count: usize) -> usize {
        usize::from(*self.left.next().unwrap_or(&0)) % count
    }

    fn one(&mut self, of: &[&str]) -> String {
        of[self.below(of.len())].to_owned()
    }

    /// A blank or the end of a line.
    fn space(&mut self) -> &'static str {
        if self.below(12) == 11 { "\n" } else { " " }
    }
}

const NAMES: [&str; 16] = [
    "n", "s", "list", "map", "a", "b", "ns.x", "words", "nested", "people", "x", "no", "yes",
    "missing", "empty", "u",
];

const LITERALS: [&str; 14] =
    ["1", "'ab'", "0", "2", "-1", "2.5", "''", "'a'", "none", "true", "[]", "{}", "' '", "'é🙂'"];

/// A whole template.
pub(crate) fn template(choices: &mut Choices<'_>) -> String {
    let mut out = "{% set ns = namespace(x='q') %}{% set a = 1 %}{% set b = [1, 'x'] %}\
                   {% macro f(p, q=2) %}{{ p }}{{ q }}{{ a }}{% endmacro %}"
        .to_owned();
    for _ in 0..=choices.below(6) {
        out.push_str(&statement(choices, 3));
    }
    out
}

fn body(choices: &mut Choices<'_>, depth: usize) -> String {
    (0..=choices.below(2)).map(|_| statement(choices, depth)).collect()
}

fn statement(choices: &mut Choices<'_>, depth: usize) -> String {
    let value = expression(choices, 3);
    let space = choices.space();
    if depth == 0 {
        return format!("{{{{{space}{value} }}}}");
    }
    match choices.below(14) {
        0..4 => format!("<{{{{{space}{value} }}}}>"),
        4 => format!("{{%{space}set a = {value} %}}"),
        5 => format!("{{% set b ={space}{value} %}}"),
        // Read first: minijinja's macros do not see a namespace that they only write to, or what they only slice.
        6 => format!("{{% if ns %}}{{% set ns.x = {value} %}}{{% endif %}}"),
        7 => {
            let count = if choices.wild { "range(60)" } else { "[1, 2, 3]" };
            let over = if choices.below(2) == 0 { count.to_owned() } else { value };
            let filter = ["", " if i", " if i != 2", " if loop is undefined"][choices.below(4)];
            let body = body(choices, depth - 1);
            let end = ["", "{% break %}", "{% if a %}{% continue %}{% endif %}"][choices.below(3)];
            // minijinja runs `else` after a break in the first round, too.
            let otherwise = if end.contains("break") { "" } else { "{% else %}-" };
            format!(
                "{{% for i in{space}{over}{filter} %}}{{{{ loop.index }}}}{{{{ loop.last }}}}{end}{body}\
                 {otherwise}{{% endfor %}}"
            )
        }
        8 => {
            let (yes, no) = (body(choices, depth - 1), body(choices, depth - 1));
            format!("{{% if {value} %}}{yes}{{% elif n %}}{no}{{% else %}}.{{% endif %}}")
        }
        9 => format!("{{% set a %}}{}{{{{ a }}}}{{% endset %}}", body(choices, depth - 1)),
        10 => format!("{{% filter trim %}}{}{{% endfilter %}}", body(choices, depth - 1)),
        11 => format!("{{% with a = {value} %}}{}{{% endwith %}}", body(choices, depth - 1)),
        12 => {
            let body = body(choices, depth - 1);
            format!("{{% macro g(c=1) %}}{{{{ c }}}}{body}{{% endmacro %}}{{{{ g({value}) }}}}")
        }
        _ => {
            let body = body(choices, depth - 1);
            format!(
                "{{% macro h() %}}{{{{ caller() }}}}{{% endmacro %}}{{% call h() %}}{body}{{% endcall %}}"
            )
        }
    }
}

fn expression(choices: &mut Choices<'_>, depth: usize) -> String {
    if depth == 0 || choices.below(5) == 0 {
        return match choices.below(3) {
            0 => choices.one(&LITERALS),
            _ => choices.one(&NAMES),
        };
    }
    let a = expression(choices, depth - 1);
    let space = choices.space();
    match choices.below(16) {
        0..3 => {
            let operators = [
                "+", "+", "~", "-", "*", "/", "//", "%", "==", "!=", "<", ">=", "in", "not in",
                "or", "**",
            ];
            let operator = choices.one(&operators);
            let b = expression(choices, depth - 1);
            format!("({a} {operator}{space}{b})")
        }
        3 => format!("[{a},{space}{}]", expression(choices, depth - 1)),
        4 => format!("{{'k': {a}, 'a': {}}}", expression(choices, depth - 1)),
        5 => format!("({a} if {} else 3)", expression(choices, depth - 1)),
        6 => format!("({a})[{}]", expression(choices, depth - 1)),
        7 => {
            // `differences.rs` says what minijinja makes of nothing backwards
            let whole = format!("({a})");
            let some = format!("({a} if {a} else 'x')");
            let slice = ["1:", ":2", "-2:", "::-1", "1:-1", "::2"];
            let slice = choices.one(&slice);
            let of = if slice == "::-1" { some } else { whole };
            format!("[{a}, {of}[{slice}]][1]")
        }
        8 => format!("({a}).{}", choices.one(&["k", "a", "name", "z", "x"])),
        9 => format!("({}{a})", choices.one(&["not ", "-"])),
        10 => {
            let tests = [
                "defined",
                "none",
                "string",
                "number",
                "mapping",
                "iterable",
                "sequence",
                "true",
                "odd",
                "in(list)",
                "eq(1)",
                "sameas(a)",
                "divisibleby(2)",
                "startingwith('a')",
                "integer",
                "lt(b)",
            ];
            format!("({a} is{space}{})", choices.one(&tests))
        }
        11 => {
            let methods = [
                "upper()",
                "strip()",
                "split('a')",
                "split()",
                "replace('a', 'bb')",
                "items()",
                "get('k')",
                "startswith('a')",
                "join(words)",
                "keys()",
                "title()",
                "find('b')",
                "splitlines()",
                "lstrip('a')",
                "endswith(words)",
                "values()",
                "get(a, b)",
                "capitalize()",
            ];
            format!("({a}).{}", choices.one(&methods))
        }
        12 => choices.one(&["f(1)", "f(a, b)", "f(q=a, p=b)", "range(3)", "dict(a=1)", "f(*[1])"]),
        _ => {
            let filters = [
                "upper",
                "length",
                "list",
                "join",
                "join(',')",
                "first",
                "last",
                "tojson",
                "string",
                "trim",
                "default(1)",
                "default('d', true)",
                "sort",
                "unique",
                "list|reverse",
                "map('upper')",
                "select",
                "reject('none')",
                "map(attribute='name')",
                "selectattr('age')",
                "batch(2)",
                "batch(3, a)",
                "slice(2)",
                "replace('a', 'b')",
                "items",
                "dictsort",
                "sum",
                "min",
                "max",
                "int",
                "float",
                "abs",
                "indent",
                "tojson(indent=2)",
                "lower",
                "title",
                "capitalize",
                "count",
                "bool",
                "safe",
                "round",
                "groupby('age')|length",
                "attr('name')",
                "lines",
                "split('x')",
            ];
            format!("({a} |{space}{})", choices.one(&filters))
        }
    }
}
