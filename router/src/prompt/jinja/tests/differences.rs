//! Where the engine is not minijinja on purpose: each time as Python's Jinja does it, or where minijinja has no end.

use super::{Json, Map, json, object, render};

fn rendered(source: &str) -> String {
    let given: Map<String, Json> = object(json!({ "list": [1, 2, 3, 4], "s": "abcd" }));
    render(source, &given).unwrap_or_else(|why| why)
}

#[test]
fn what_minijinja_does_otherwise() {
    for (source, ours) in [
        // Of constants, `and` gives its left side there only if it is true.
        ("[{{ '' and 'x' }}]", "[]"),
        // Slices backwards leave their end out.
        ("{{ list[3:0:-1] }}{{ s[2:0:-1] }}", "[4, 3, 2]cb"),
        // There, what is empty has one item backwards, and showing that item panics.
        ("{{ [][::-1] }}{{ ''[::-1] }}{{ 'x' if [][::-1] else 'y' }}", "[]y"),
        // An empty string is between all characters; there, counting it has no end.
        ("{{ s.count('') }}", "5"),
        // A macro sees the namespace that it only writes to, and what it only slices.
        (
            "{% set n = namespace(x=1) %}{% macro f() %}{% set n.x = 2 %}{% endmacro %}{{ f() }}{{ n.x }}",
            "2",
        ),
        ("{% set t = 'xyz' %}{% macro f() %}{{ t[1:] }}{% endmacro %}{{ f() }}", "yz"),
        // The keys of a map, too, are reversed.
        ("{{ {'a': 1, 'b': 2} | reverse | join }}", "ba"),
        // A loop may be left from inside of `with`.
        ("{% for i in list %}{% with a = i %}{% break %}{% endwith %}{% endfor %}-", "-"),
        // `else` is for loops that had no item; there, a break in the first round runs it, too.
        ("{% for i in list %}{% break %}{% else %}x{% endfor %}-", "-"),
        // As in Python, lists are no keys.
        (
            "{{ {[1]: 2} }}",
            "invalid operation: lists and maps cannot be keys of a map (line 1 of the template)",
        ),
    ] {
        assert_eq!(rendered(source), ours, "{source}");
    }
}
