//! Templates that copy, nest, search, print and recurse without end. Each ends by the bound that it is after.

use std::time::Duration;

use super::{Bound, ErrorKind, Json, Limits, Map, Program, json, object, small, within};

/// What a template with `x` long and `l` wide does.
fn attack(source: &str) -> Result<String, ErrorKind> {
    let given = object(json!({ "x": "x".repeat(100_000), "l": vec![1; 5_000] }));
    within(small(), source, &given).map_err(|(kind, _)| kind)
}

/// `body`, a hundred thousand times, with a namespace `ns` whose `v` is `first`.
fn often(first: &str, body: &str, then: &str) -> String {
    format!(
        "{{% set ns = namespace(v={first}) %}}{{% for i in range(100000) %}}{body}{{% endfor %}}{then}"
    )
}

#[track_caller]
fn ends_by(bound: Bound, sources: &[String]) {
    for source in sources {
        assert_eq!(attack(source), Err(ErrorKind::Spent(bound)), "{source}");
    }
}

#[test]
fn what_grows_ends_by_memory() {
    ends_by(
        Bound::Memory,
        &[
            often("'ab'", "{% set ns.v = ns.v + ns.v %}", ""),
            often("'ab'", "{% set ns.v = ns.v ~ ns.v ~ 1 %}", ""),
            often("[1]", "{% set ns.v = ns.v + ns.v %}", ""),
            often("'ab'", "{% set ns.v %}{{ ns.v }}{{ ns.v }}{% endset %}", ""),
            often("'ab'", "{% set ns.v = ns.v * 3 %}", ""),
            often("[1]", "{% set ns.v = ns.v * 3 %}", ""),
            often("'ab'", "{% set ns.v = ns.v.replace('', 'ab') %}", ""),
            often("'ab'", "{% set ns.v = ns.v | replace('a', ns.v) %}", ""),
            often("'ab'", "{% set ns.v = [ns.v, ns.v] | join %}", ""),
            often("'ab'", "{% set ns.v = ns.v | tojson | tojson %}", ""),
            often("[1]", "{% set ns.v = (ns.v | list) + (ns.v | list) %}", ""),
            often("[1]", "{% set ns.v = (ns.v | batch(2, 1)) + ns.v %}", ""),
            "{{ l | batch(1000000000, 1) }}".to_owned(),
            "{{ l | slice(1000000000) }}".to_owned(),
            "{{ x | indent(1000000000) }}".to_owned(),
            "{{ ([x] * 1000) | join }}".to_owned(),
            "{{ 'a' * 20000000 }}".to_owned(),
            "{{ [1] * 1000000000000 }}".to_owned(),
            "{{ {'k': 1} | tojson(indent='x' * 9000000) }}".to_owned(),
            "{{ x | list | list | list }}".to_owned(),
            "{% filter upper %}{% for i in l %}{{ x }}{% endfor %}{% endfilter %}".to_owned(),
            "{% macro f() %}{% for i in l %}{{ x }}{% endfor %}{% endmacro %}{{ f() }}".to_owned(),
        ],
    );
}

#[test]
fn what_nests_ends_by_depth() {
    for then in
        ["{{ ns.v }}", "{{ ns.v == [ns.v] }}", "{{ ns.v | tojson }}", "{{ ns.v | batch(2) }}", ""]
    {
        ends_by(
            Bound::Nested,
            &[
                often("[]", "{% set ns.v = [ns.v] %}", then),
                often("[]", "{% set ns.v = {'k': ns.v} %}", then),
                often("[]", "{% set ns.v = [ns.v] + [ns.v] %}", then),
                often("[]", "{% set ns.v = (ns.v | list | batch(1)) + [[ns.v]] %}", then),
                often("[]", "{% set ns.v = dict(k=ns.v) %}", then),
                often("[]", "{% set ns.v = dict(k=ns.v).items() %}", then),
            ],
        );
    }
}

/// What a template does so many times, where the loop itself costs a fraction of what is allowed.
fn times(count: u32, set: &str, body: &str) -> String {
    format!("{set}{{% for i in range({count}) %}}{body}{{% endfor %}}")
}

#[test]
fn what_takes_long_ends_by_work() {
    let others = "{% set m = l | list %}{% set y = x[1:] + 'x' %}";
    // a long text or list each, without end, and with next to no memory
    for body in [
        "{% if 'y' in x %}{% endif %}",
        "{% if x.find('y') %}{% endif %}",
        "{% if x.rfind('y') %}{% endif %}",
        "{% if x.count('y') %}{% endif %}",
        "{% if x.replace('y', 'z') %}{% endif %}",
        "{% if x.split('y') %}{% endif %}",
        "{% if x.split() %}{% endif %}",
        "{% if x.splitlines() %}{% endif %}",
        "{% if x.strip('x') %}{% endif %}",
        "{% if (' ' * 100000).strip() %}{% endif %}",
        "{% if x.startswith(y) %}{% endif %}",
        "{% if x.isalpha() %}{% endif %}",
        "{% if x[1:] %}{% endif %}",
        "{% if x[99999] %}{% endif %}",
        "{% if x | length %}{% endif %}",
        "{% if x == y %}{% endif %}",
        "{% if x < y %}{% endif %}",
        "{% if {'a': 1}[x] %}{% endif %}",
        "{% if 2 in l %}{% endif %}",
        "{% if l.count(2) %}{% endif %}",
        "{% if l == m %}{% endif %}",
        "{% if l < m %}{% endif %}",
        "{% if l | min %}{% endif %}",
        "{% if l | sum %}{% endif %}",
        "{% for j in l %}{% endfor %}",
    ] {
        ends_by(Bound::Work, &[times(5_000, others, body)]);
    }
    let cheap = "{% if 'y' in 'x' %}{% endif %}{% if l[0] == m[0] %}{% endif %}";
    assert_eq!(attack(&times(5_000, others, cheap)), Ok(String::new()), "the loop is not to blame");
    // much to do in each round, none of it long
    ends_by(Bound::Work, &[times(5_000, "", &"{{ '' }}".repeat(100))]);
    // Each level twice what the one below is: little memory, and no end of things to look at.
    let twice = "{% set ns = namespace(v=[], w=[]) %}{% for i in range(90) %}{% set ns.v = [ns.v, ns.v] %}\
        {% set ns.w = [ns.w, ns.w] %}{% endfor %}";
    for look in ["{{ ns.v == ns.w }}", "{{ ns.v < ns.w }}"] {
        ends_by(Bound::Work, &[format!("{twice}{look}")]);
    }
}

#[test]
fn what_is_made_is_paid_for_whether_it_is_kept_or_not() {
    let set = "{% set d = dict() %}{% set p = l | map('string') | list %}";
    for body in [
        "{% set y = x ~ 'y' %}",
        "{% set y %}{{ x }}{% endset %}",
        "{% set y = x * 2 %}",
        "{% set y = x | upper %}",
        "{% set y = x | title %}",
        "{% set y = x | reverse %}",
        "{% set y = x | replace('x', 'y') %}",
        "{% set y = x | indent(2, true) %}",
        "{% set y = x | tojson %}",
        "{% set y = x[::2] %}",
        "{% set y = x | list %}",
        "{% set y = x.split('x') %}",
        "{% set y = '\\n'.join(p) %}",
        "{% set y = p | join(',') %}",
        "{% set y = p ~ '' %}",
        "{% set y = p | string %}",
        "{% set y = l + l %}",
        "{% set y = l * 2 %}",
        "{% set y = l[::2] %}",
        "{% set y = l | list %}",
        "{% set y = l | reverse %}",
        "{% set y = l | sort %}",
        "{% set y = l | map('int') %}",
        "{% set y = l | select %}",
        "{% set y = l | batch(5) %}",
        "{% set y = l | slice(5) %}",
        "{% set y = range(5000) %}",
        "{% set y = o | items %}",
        "{% set y = o | dictsort %}",
        "{% set y = o.keys() %}",
        "{% set y = dict(o) %}",
        "{% set y = [i, i] | sort(attribute=x) %}",
    ] {
        // each makes 10 kB at least
        let made = with_much_work(&times(1_000, set, body));
        assert_eq!(made, Err(ErrorKind::Spent(Bound::Memory)), "{body}");
    }
    let cheap = "{% set y = x[1:] %}{% set y = l[1:] %}{% set y = x.strip() %}{% set y = x.replace('y', 'z') %}";
    assert_eq!(with_much_work(&times(1_000, set, cheap)), Ok(String::new()), "views cost nothing");
}

/// As [`attack`] with more work than memory, and an object `o` of a thousand fields.
fn with_much_work(source: &str) -> Result<String, ErrorKind> {
    let fields: Map<String, Json> = (0..1_000).map(|i| (format!("k{i}"), json!(i))).collect();
    let given = json!({ "x": "x".repeat(100_000), "l": vec![1; 5_000], "o": fields });
    let limits = Limits { work: 2_000_000_000, ..small() };
    within(limits, source, &object(given)).map_err(|(kind, _)| kind)
}

#[test]
fn what_is_put_into_a_list_or_a_map_counts_for_its_depth() {
    for body in [
        "{% set ns.v = [1] + [ns.v] %}",
        "{% set ns.v = [1] + [2, ns.v] %}",
        "{% set ns.v = {'a': 1, 'k': ns.v} %}",
        "{% set ns.v = {'k': ns.v, 'z': 1} %}",
        "{% set ns.v = dict({'k': ns.v}, a=1) %}",
        "{% set ns.v = [ns.v, 1] %}",
        "{% set ns.v = (1, ns.v) | list %}",
    ] {
        ends_by(Bound::Nested, &[times(1_000, "{% set ns = namespace(v=[]) %}", body)]);
    }
}

#[test]
fn what_is_printed_many_times_over_ends() {
    let twice = "{% set ns = namespace(v=[]) %}{% for i in range(90) %}{% set ns.v = [ns.v, ns.v] %}{% endfor %}";
    for then in ["{{ ns.v }}", "{{ ns.v ~ '' }}", "{{ ns.v | tojson }}", "{{ ns.v | join }}"] {
        let kind = attack(&format!("{twice}{then}")).unwrap_err();
        assert!(matches!(kind, ErrorKind::Spent(Bound::Work | Bound::Memory)), "{then}: {kind:?}");
    }
    assert_eq!(
        attack("{% for i in range(100000) %}{{ x }}{% endfor %}"),
        Err(ErrorKind::Spent(Bound::Output))
    );
}

#[test]
fn what_holds_itself_ends_by_levels() {
    let cycle = "{% set a = namespace() %}{% set b = namespace(x=a) %}{% set a.x = [b] %}";
    let looped = "{% set a = namespace() %}{% for i in [1, 2] %}{% set a.x = [a, loop] %}{% if loop.changed(a) %}{% endif %}";
    ends_by(
        Bound::Levels,
        &[
            format!("{cycle}{{{{ a }}}}"),
            format!("{cycle}{{{{ a ~ 1 }}}}"),
            format!("{cycle}{{{{ a | tojson }}}}"),
            format!(
                "{cycle}{{% set c = namespace() %}}{{% set d = namespace(x=c) %}}\
                 {{% set c.x = [d] %}}{{{{ a == c }}}}{{{{ a < c }}}}"
            ),
            format!("{looped}{{{{ a }}}}{{% endfor %}}"),
            "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}".to_owned(),
            "{% set ns = namespace() %}{% macro f() %}{{ ns.g() }}{% endmacro %}\
             {% macro g() %}{{ ns.f() }}{% endmacro %}{% set ns.f = f %}{% set ns.g = g %}{{ f() }}"
                .to_owned(),
            "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}".to_owned(),
            "{% for i in [1] recursive %}{% set x = loop([1]) %}{% endfor %}".to_owned(),
            "{% macro f() %}{{ caller }}{% call f() %}x{% endcall %}{% endmacro %}{{ f() }}"
                .to_owned(),
        ],
    );
}

#[test]
fn a_busy_machine_ends_by_time() {
    let limits = Limits { time: Duration::ZERO, ..Limits::of(0) };
    let source = "{% for i in range(100000) %}{{ i }}{% endfor %}";
    let (kind, why) = within(limits, source, &Map::new()).unwrap_err();
    assert_eq!(kind, ErrorKind::Spent(Bound::Time));
    assert!(why.contains("longer than"), "{why}");
    // nor only at the first look at the clock: all the work that is allowed takes far longer than this
    let limits = Limits { time: Duration::from_millis(20), ..Limits::of(0) };
    let source = "{% for i in range(100000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}";
    assert_eq!(within(limits, source, &Map::new()).unwrap_err().0, ErrorKind::Spent(Bound::Time));
}

#[test]
fn nested_sources_are_refused_or_read() {
    let deep = 200_000;
    for (open, close) in [
        ("not ", ""),
        ("-", ""),
        ("(", ")"),
        ("[", "]"),
        ("{'a':", "}"),
        ("1+", ""),
        ("1 if 1 else ", ""),
        ("f(", ")"),
        ("a|upper and ", ""),
        ("a[", "]"),
        ("1 ** ", ""),
    ] {
        for count in [150, deep] {
            let source = format!("{{{{ {}1{} }}}}", open.repeat(count), close.repeat(count));
            let read = Program::new(&source);
            assert!(count == 150 || read.is_err(), "{open}");
        }
    }
    for postfix in [".a", "|upper", "()", "[0]", " is defined", "~1", " == 1"] {
        assert!(
            Program::new(&format!("{{{{ 1{} }}}}", postfix.repeat(deep))).is_err(),
            "{postfix}"
        );
    }
    for (open, close) in [
        ("{% if 1 %}", "{% endif %}"),
        ("{% for i in x %}", "{% endfor %}"),
        ("{% macro f() %}", "{% endmacro %}"),
        ("{% set x %}", "{% endset %}"),
        ("{% if 1 %}{% elif 1 %}", "{% endif %}"),
    ] {
        let source = format!("{}{}", open.repeat(20_000), close.repeat(20_000));
        assert!(Program::new(&source).is_err(), "{open}");
    }
    let elifs = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(900));
    assert!(Program::new(&elifs).is_ok());
    let elifs = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(20_000));
    assert!(Program::new(&elifs).unwrap_err().contains("elif"));
    assert!(Program::new(&"x".repeat(2 << 20)).unwrap_err().contains("1024 KiB"));
}

#[test]
fn what_costs_without_bound_is_refused_by_name() {
    for (source, name) in [
        ("{% include 'x' %}", "`include`"),
        ("{% extends 'x' %}", "`extends`"),
        ("{% import 'x' as y %}", "`import`"),
        ("{% from 'x' import y %}", "`from ... import`"),
        ("{% block a %}{% endblock %}", "`block`"),
        ("{% autoescape true %}{% endautoescape %}", "`autoescape`"),
        ("{{ self.a() }}", "`self`"),
        ("{{ super() }}", "`super`"),
        ("{{ debug() }}", "`debug`"),
        ("{{ 1 | pprint }}", "`pprint`"),
        ("{{ 1 | e }}", "`e`"),
        ("{{ 'x' is safe }}", "`safe`"),
        ("{{ 1 | nothing }}", "filter nothing is unknown"),
        ("{{ 1 is nothing }}", "test nothing is unknown"),
    ] {
        let why = Program::new(&format!("\n{source}")).unwrap_err();
        assert!(why.contains(name) && why.contains("line 2"), "{source}: {why}");
    }
    assert!(Program::new("{% macro debug() %}{% endmacro %}{{ debug() }}").is_ok());
}

#[test]
fn joining_system_messages_is_linear() {
    let source = "{% set ns = namespace(text='', first=true) %}{% for m in messages %}\
        {% if m['role'] == 'system' %}{% if ns.first %}{% set ns.text = ns.text + m['content'] %}\
        {% set ns.first = false %}{% else %}{% set ns.text = ns.text + '\\n\\n' + m['content'] %}\
        {% endif %}{% endif %}{% endfor %}{{ ns.text }}";
    let message = |_| json!({ "role": "system", "content": "0123456789".repeat(10) });
    let messages: Vec<Json> = (0..10_000).map(message).collect();
    // A million bytes in ten thousand pieces: about 30 units a byte, and a thousand a message.
    let limits = Limits { work: 60_000_000, memory: 8 << 20, ..Limits::of(0) };
    let text = within(limits, source, &object(json!({ "messages": messages }))).unwrap();
    assert_eq!(text.len(), 10_000 * 100 + 9_999 * 2);
}

#[test]
fn lists_that_are_built_one_by_one_are_linear() {
    let source = "{% set ns = namespace(l=[]) %}{% for i in range(20000) %}{% set ns.l = ns.l + [i] %}\
        {% endfor %}{{ ns.l | length }}";
    let limits = Limits { work: 60_000_000, memory: 16 << 20, ..Limits::of(0) };
    assert_eq!(within(limits, source, &Map::new()).unwrap(), "20000");
}

#[test]
fn what_the_client_nests_is_refused() {
    let mut deep = json!("deep");
    for _ in 0..200 {
        deep = json!([deep]);
    }
    let (kind, _) = within(Limits::of(0), "{{ 1 }}", &object(json!({ "x": deep }))).unwrap_err();
    assert_eq!(kind, ErrorKind::Spent(Bound::Nested));
    let fields: Map<String, Json> = (0..120_000).map(|i| (format!("k{i}"), json!(i))).collect();
    let (kind, _) = within(small(), "{{ 1 }}", &object(json!({ "x": fields }))).unwrap_err();
    assert_eq!(kind, ErrorKind::Spent(Bound::Memory));
    let wide = vec![json!([]); 200_000];
    let (kind, _) = within(small(), "{{ 1 }}", &object(json!({ "x": wide }))).unwrap_err();
    assert_eq!(kind, ErrorKind::Spent(Bound::Memory));
}
