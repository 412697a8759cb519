mod bounds;
mod markers;

use std::sync::Arc;

use super::compile::MAX_LEVELS;
use super::*;
use crate::core::frame::{Grammar, GrammarKind, MAX_GRAMMAR_BYTES};

const WORDS: usize = 9; // of the mask of 257 tokens
const END: u32 = 256;

fn regex(source: &str) -> Grammar {
    Grammar { kind: GrammarKind::Regex, source: source.into() }
}

fn follower(source: &str) -> Follower {
    GrammarTokens::of_bytes().compile(&regex(source)).expect("it is a grammar").follower()
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// What may follow the answer and each of the drafts: the tokens, or which of all and nothing it is.
fn may_follow(follower: &mut Follower, drafts: &str) -> Vec<String> {
    let drafts = ids(drafts);
    let (mut masks, mut dead) = (vec![7; WORDS * (drafts.len() + 1)], vec![true; drafts.len() + 1]);
    follower.fill_masks(&drafts, &mut masks, &mut dead, &mut |_| true);
    let rows = masks.chunks_exact(WORDS).zip(dead);
    rows.map(|(row, dead)| {
        let allowed: Vec<u32> =
            (0..=END).filter(|id| row[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        match (dead, allowed.len()) {
            (true, _) => "nothing".to_owned(),
            (false, 257) => "all".to_owned(),
            _ => allowed.iter().filter_map(|id| char::from_u32(*id)).collect(),
        }
    })
    .collect()
}

#[test]
fn the_rows_of_a_step_follow_its_drafts_and_leave_the_answer_where_it_was() {
    let mut answer = follower("a[bc]d");
    for _ in 0..2 {
        assert_eq!(may_follow(&mut answer, "abd"), ["a", "bc", "d", "nothing"]);
    }
    assert!(!answer.advance(&ids("a")));
    assert_eq!(may_follow(&mut answer, "cd"), ["bc", "d", "nothing"]);
    assert_eq!(may_follow(&mut answer, ""), ["bc"]);
}

#[test]
fn behind_a_draft_that_is_not_allowed_no_row_counts_and_none_is_dead() {
    let mut answer = follower("a[bc]d");
    assert_eq!(may_follow(&mut answer, "axd"), ["a", "bc", "all", "all"]);
    assert_eq!(may_follow(&mut answer, "abd"), ["a", "bc", "d", "nothing"], "it was not taken");
    assert_eq!(answer.error(), None);
}

#[test]
fn an_answer_ends_where_nothing_may_follow() {
    let mut answer = follower("ab?");
    assert!(!answer.advance(&ids("a")) && !answer.finished());
    assert!(answer.advance(&ids("b")) && answer.finished());
    assert!(answer.advance(&ids("x")), "it stays complete");
    assert_eq!(may_follow(&mut answer, "a"), ["nothing", "nothing"]);
    assert_eq!(answer.count_allowed(&ids("a")), 0);
    assert_eq!(answer.error(), None);
}

#[test]
fn a_token_that_is_not_allowed_leaves_an_answer_that_nothing_may_follow() {
    let mut answer = follower("a[bc]d");
    assert!(!answer.advance(&ids("ax")));
    for _ in 0..2 {
        assert_eq!(may_follow(&mut answer, "d"), ["nothing", "nothing"]);
        assert!(!answer.finished());
        assert_eq!(answer.count_allowed(&ids("b")), 0);
        assert!(!answer.advance(&ids("bd")), "no later token mends it");
    }
    assert!(answer.error().is_some());
}

#[test]
fn drafts_are_counted_up_to_the_first_that_is_not_allowed_and_not_taken() {
    let mut answer = follower("a[bc]d");
    for (drafts, allowed) in [("abd", 3), ("abx", 2), ("xab", 0), ("", 0), ("abd", 3)] {
        assert_eq!(answer.count_allowed(&ids(drafts)), allowed, "{drafts}");
    }
}

#[test]
fn answers_with_one_grammar_stand_each_for_itself() {
    let compiled = GrammarTokens::of_bytes().compile(&regex("a[bc]d")).expect("it is one");
    let (mut one, mut other) = (compiled.follower(), compiled.follower());
    one.advance(&ids("ab"));
    assert_eq!(may_follow(&mut one, ""), ["d"]);
    assert_eq!(may_follow(&mut other, ""), ["a"]);
    assert_eq!(may_follow(&mut compiled.follower(), ""), ["a"]);
}

#[test]
fn the_grammar_that_was_not_asked_for_for_longest_gives_way() {
    let known = KnownGrammars::new(2);
    let seen = |source: &str| {
        let found = known.get(&regex(source))?;
        Some(*found.expect("it was good"))
    };
    known.put(regex("a"), Ok(Arc::new(1)));
    known.put(regex("b"), Ok(Arc::new(2)));
    assert_eq!(seen("a"), Some(1));
    known.put(regex("c"), Ok(Arc::new(3)));
    assert_eq!([seen("a"), seen("b"), seen("c")], [Some(1), None, Some(3)]);
    known.put(regex("a"), Ok(Arc::new(4))); // once more: nobody has to go
    assert_eq!([seen("c"), seen("a")], [Some(3), Some(4)]);
    known.put(Grammar { kind: GrammarKind::Lark, ..regex("c") }, Err(GrammarError::new("none")));
    assert_eq!([seen("c"), seen("a")], [None, Some(4)], "of another kind it is another one");
}

#[test]
fn room_for_none_is_room_for_one() {
    let known = KnownGrammars::new(0);
    for source in ["a", "b"] {
        known.put(regex(source), Ok(Arc::new(())));
        assert!(known.get(&regex(source)).is_some());
    }
    assert!(known.get(&regex("a")).is_none());
}

#[test]
fn brackets_are_bounded_by_how_deep_they_are_nested_and_not_by_how_many() {
    let nested = |depth: usize| format!("{}a{}", "(".repeat(depth), ")".repeat(depth));
    let lark = |source: String| Grammar {
        kind: GrammarKind::Lark,
        source: format!("start: {source}").into(),
    };
    assert_eq!(check_grammar(&regex(&nested(64))), Ok(()));
    assert_eq!(check_grammar(&regex(&"(a)".repeat(100))), Ok(()));
    assert_eq!(check_grammar(&lark(nested(20).replace('a', "\"a\""))), Ok(()));
    for grammar in [regex(&nested(65)), lark(nested(65).replace('a', "\"a\""))] {
        let refused = check_grammar(&grammar).expect_err("it is too deep");
        assert_eq!(refused.to_string(), "its brackets are nested deeper than 64 levels");
    }
}

/// Rules or tokens, each of which is the next one within so many brackets: as many levels as a grammar may have.
fn deepest_lark(brackets: usize, first: u8) -> String {
    let letter = |n: usize| char::from(first + u8::try_from(n % 26).expect("a letter"));
    let name = |n: usize| String::from_iter([n / 676, n / 26, n].map(letter));
    let (open, close) = ("(".repeat(brackets), ")".repeat(brackets));
    let mut source = format!("start:{}\n", name(0));
    let rules = (MAX_LEVELS - 2) / (brackets + 1);
    let room = MAX_GRAMMAR_BYTES - 100;
    let mut n = 0;
    while n < rules && source.len() < room {
        source += &format!("{}:{open}{}{close}\n", name(n), name(n + 1));
        n += 1;
    }
    source + &format!("{}:\"x\"\n", name(n))
}

#[test]
fn the_deepest_rules_and_tokens_fit_onto_the_stack() {
    for brackets in [0, 1, 8, 22] {
        for first in *b"aA" {
            let source = deepest_lark(brackets, first).into();
            let grammar = Grammar { kind: GrammarKind::Lark, source };
            assert_eq!(check_grammar(&grammar), Ok(()), "{brackets} {first}");
        }
    }
}

#[test]
fn rules_and_brackets_are_bounded_together() {
    let with = |levels: usize| Grammar {
        kind: GrammarKind::Lark,
        source: format!("start:{}\"x\"", "(\"y\")".repeat(levels - 1)).into(),
    };
    let told = |levels| check_grammar(&with(levels)).err().map(|error| error.to_string());
    let limit = "it has 10001 rules and brackets, the limit is 10000";
    assert_eq!(told(MAX_LEVELS + 1).as_deref(), Some(limit));
    assert_eq!(told(MAX_LEVELS), None);
}

#[test]
fn the_deepest_schemas_fit_onto_the_stack() {
    for levels in [0, 1, 10] {
        let mut source = String::from(r##"{"$ref":"#/$defs/0","$defs":{"##);
        let (open, close) = (r#"{"items":"#.repeat(levels), "}".repeat(levels));
        let room = MAX_GRAMMAR_BYTES - 40 - levels * 10;
        let mut n = 0;
        while source.len() < room {
            source += &format!(r##""{n}":{open}{{"$ref":"#/$defs/{}"}}{close},"##, n + 1);
            n += 1;
        }
        source += &format!(r#""{n}":{{}}}}}}"#);
        let grammar = Grammar { kind: GrammarKind::Json, source: source.into() };
        assert_eq!(check_grammar(&grammar), Ok(()), "{levels}");
    }
}

#[test]
fn a_message_is_one_line_of_bounded_length() {
    let long = "é".repeat(301);
    assert_eq!(GrammarError::new(&long).to_string(), format!("{}...", "é".repeat(300)));
    assert_eq!(GrammarError::new(&long[2..]).to_string(), "é".repeat(300));
    assert_eq!(GrammarError::new(" why\n<backtrace>\nwhere").to_string(), "why");
}

#[test]
fn a_name_in_a_path_is_short_and_so_is_the_path() {
    let mut schema = serde_json::json!({"not": {}});
    for _ in 0..6 {
        schema = serde_json::json!({"properties": {"n".repeat(100): schema}});
    }
    let wrong = check_schema(&schema).expect_err("`not` is not enforced");
    let step = format!(".properties.{}", "n".repeat(64));
    assert!(wrong.path.starts_with(&format!("{step}{step}{step}.properties.")), "{}", wrong.path);
    assert_eq!(wrong.path.len(), 256);
}

/// How much of a string may follow where a JSON schema is kept.
fn kept(schema: &serde_json::Value, text: &str) -> bool {
    let source = schema.to_string().into();
    let grammar = Grammar { kind: GrammarKind::Json, source };
    let compiled = GrammarTokens::of_bytes().compile(&grammar).expect("it is a schema");
    let tokens = ids(&serde_json::Value::from(text).to_string());
    compiled.follower().count_allowed(&tokens) == tokens.len()
}

#[test]
fn moments_are_of_dates_that_exist_and_of_seconds_that_each_minute_has() {
    let days = [
        ("2024-02-29", true),
        ("2000-02-29", true),
        ("1600-02-29", true),
        ("2096-02-29", true),
        ("2023-02-28", true),
        ("0001-12-31", true),
        ("1000-04-30", true),
        ("0100-01-31", true),
        ("2023-02-29", false),
        ("1900-02-29", false),
        ("2024-02-30", false),
        ("2022-02-29", false),
        ("0000-01-01", false),
        ("0000-02-29", false),
        ("2024-04-31", false),
        ("2024-13-01", false),
        ("2024-01-32", false),
        ("2024-00-10", false),
        ("2024-10-00", false),
    ];
    let times = [
        ("23:59:59Z", true),
        ("00:00:00.123456789+23:59", true),
        ("19:30:09-00:00", true),
        ("23:59:60Z", false),
        ("12:00:60+01:00", false),
        ("24:00:00Z", false),
        ("12:60:00Z", false),
        ("12:00:00", false),
        ("12:00:00.Z", false),
        ("12:00:00+24:00", false),
    ];
    let format = |name: &str| serde_json::json!({"type": "string", "format": name});
    for (day, is_one) in days {
        assert_eq!(kept(&format("date"), day), is_one, "{day}");
        assert_eq!(kept(&format("date-time"), &format!("{day}T12:00:00Z")), is_one, "{day}");
    }
    for (time, is_one) in times {
        assert_eq!(kept(&format("time"), time), is_one, "{time}");
        assert_eq!(kept(&format("date-time"), &format!("2024-02-29T{time}")), is_one, "{time}");
    }
    assert!(!kept(&format("date"), "x2024-01-01") && !kept(&format("date"), "2024-01-010"));
}

#[test]
fn a_moment_keeps_its_own_pattern_too_and_is_found_wherever_a_schema_stands() {
    use serde_json::json;
    let date = json!({"type": "string", "format": "date"});
    let ends = json!({"type": "string", "format": "date", "pattern": "9$"});
    let all =
        json!({"type": "string", "format": "date", "pattern": "9$", "allOf": [{"pattern": "^1"}]});
    assert!(kept(&ends, "2024-01-29") && !kept(&ends, "2024-01-28") && !kept(&ends, "2023-02-29"));
    assert!(kept(&all, "1024-01-29") && !kept(&all, "2024-01-29") && !kept(&all, "1024-01-28"));
    let text = |schema: &serde_json::Value, answer: &str| {
        let grammar = Grammar { kind: GrammarKind::Json, source: schema.to_string().into() };
        let compiled = GrammarTokens::of_bytes().compile(&grammar).expect("it is a schema");
        compiled.follower().count_allowed(&ids(answer)) == answer.len()
    };
    for (schema, before, after) in [
        (json!({"properties": {"format": date}}), "{\"format\":", "}"),
        (json!({"patternProperties": {"^a": date}, "additionalProperties": false}), "{\"a\":", "}"),
        (json!({"type": "object", "additionalProperties": date}), "{\"b\":", "}"),
        (json!({"type": "array", "items": date}), "[", "]"),
        (json!({"type": "array", "prefixItems": [date], "items": {"type": "null"}}), "[", "]"),
        (json!({"anyOf": [date, {"type": "null"}]}), "", ""),
        (json!({"oneOf": [date, {"type": "null"}]}), "", ""),
        (json!({"allOf": [date]}), "", ""),
        (json!({"$ref": "#/$defs/d", "$defs": {"d": date}}), "", ""),
        (json!({"$ref": "#/definitions/d", "definitions": {"d": date}}), "", ""),
    ] {
        assert!(text(&schema, &format!("{before}\"2024-02-29\"{after}")), "{schema}");
        assert!(!text(&schema, &format!("{before}\"2023-02-29\"{after}")), "{schema}");
    }
    let values = json!({"enum": [{"format": "date"}], "default": {"format": "time"}});
    assert!(text(&values, "{\"format\":\"date\"}"), "values are no schemas");
}

/// Ways to read it grow with each letter: a bound of a mask is met soon.
fn ambiguous() -> Grammar {
    let names: Vec<String> = (0..10).map(|number| format!("s{number}")).collect();
    let mut lark = String::from("start: \"x\" s0\n");
    for name in &names {
        let pairs = names.iter().flat_map(|a| names.iter().map(move |b| format!(" | {a} {b}")));
        lark.push_str(&format!("{name}: \"a\"{}\n", pairs.collect::<String>()));
    }
    Grammar { kind: GrammarKind::Lark, source: lark.into() }
}

#[test]
fn a_bound_that_is_met_in_mid_answer_leaves_nothing_to_follow_and_says_why_in_a_line() {
    let compiled = GrammarTokens::of_bytes().compile(&ambiguous()).expect("it compiles");
    let mut answer = compiled.follower();
    assert_eq!(may_follow(&mut answer, ""), ["x"]);
    assert!(!answer.advance(&ids("x")));
    assert_eq!(answer.error(), None);
    let mut letters = 0;
    while may_follow(&mut answer, "") == ["a"] {
        assert!(letters < 20, "the bound is met");
        answer.advance(&ids("a"));
        letters += 1;
    }
    for _ in 0..2 {
        assert_eq!(may_follow(&mut answer, "aa"), ["nothing", "nothing", "nothing"]);
        assert!(!answer.advance(&ids("a")) && !answer.finished());
        assert_eq!(answer.count_allowed(&ids("a")), 0);
    }
    let why = answer.error().expect("a bound was met");
    assert!(why.contains("items") && !why.contains('\n') && !why.contains('<'), "{why}");
    let mut other = compiled.follower();
    assert!(!other.advance(&ids("x")));
    assert_eq!((may_follow(&mut other, ""), other.error()), (vec!["a".to_owned()], None));
}

#[test]
fn a_bound_that_is_met_behind_drafts_is_no_end_of_the_answer() {
    let compiled = GrammarTokens::of_bytes().compile(&ambiguous()).expect("it compiles");
    let mut answer = compiled.follower();
    answer.advance(&ids("x"));
    assert_eq!(answer.count_allowed(&ids("x")), 0);
    let rows = may_follow(&mut answer, "aaaaaaaa");
    assert!(rows.iter().all(|row| row == "nothing"), "it is put off: {rows:?}");
    assert_eq!(answer.error(), None);
    for _ in 0..2 {
        let rows = may_follow(&mut answer, "aaaaaaaa");
        assert_eq!(rows[0], "a");
        assert!(rows[1..].iter().all(|row| row == "nothing"), "no draft is looked at: {rows:?}");
        assert_eq!((answer.count_allowed(&ids("a")), answer.error()), (0, None));
    }
}

#[test]
fn drafts_that_are_counted_meet_a_bound_and_the_answer_takes_its_tokens_again() {
    let compiled = GrammarTokens::of_bytes().compile(&ambiguous()).expect("it compiles");
    let mut answer = compiled.follower();
    answer.advance(&ids("x"));
    assert!(answer.count_allowed(&ids("aaaaaaaa")) < 8);
    assert_eq!((may_follow(&mut answer, ""), answer.error()), (vec!["a".to_owned()], None));
    assert_eq!(answer.count_allowed(&ids("a")), 0, "it has no drafts any more");
}

#[test]
fn bytes_that_no_token_has_are_told_so() {
    let words = [b"a".to_vec(), b"b".to_vec(), Vec::new()];
    let tokens = GrammarTokens::new(&words, &[2]).expect("they are a vocabulary");
    let mut answer = tokens.compile(&regex("ab(c|d)")).expect("it compiles").follower();
    assert!(!answer.advance(&[0, 1]));
    let (mut mask, mut dead) = ([0], [false]);
    answer.fill_masks(&[], &mut mask, &mut dead, &mut |_| true);
    assert!(dead[0] && !answer.finished());
    assert_eq!(answer.error().as_deref(), Some("no token has the bytes that come next"));
}
