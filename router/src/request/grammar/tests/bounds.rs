//! Work and memory of answers.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::follower::WORK_OF_TOKEN;
use super::super::memory::bytes_of_answer;
use super::super::*;
use super::{WORDS, follower, ids, may_follow, regex};
use crate::core::frame::{Grammar, GrammarKind};

fn fill(
    answer: &mut Follower,
    drafts: &str,
    spend: &mut dyn FnMut(u64) -> bool,
) -> (Masked, Vec<bool>) {
    let drafts = ids(drafts);
    let (mut masks, mut dead) =
        (vec![0; WORDS * (drafts.len() + 1)], vec![false; drafts.len() + 1]);
    (answer.fill_masks(&drafts, &mut masks, &mut dead, spend), dead)
}

#[test]
fn many_tokens_at_once_are_taken_in_portions() {
    let text = "a".repeat(200);
    let mut answer = follower("a{1,300}cb");
    answer.advance_later(ids(&text));
    assert!(!answer.advance(&ids("c")), "behind the others");
    assert_eq!(answer.count_allowed(&ids("b")), 0);
    let mut of_portions = Vec::new();
    let mut spend = |work| {
        of_portions.push(work);
        false
    };
    while fill(&mut answer, "", &mut spend) == (Masked::PutOff, vec![true]) {
        assert!(!answer.finished());
    }
    let tokens: Vec<u64> = of_portions[..4].iter().map(|work| work / WORK_OF_TOKEN).collect();
    assert_eq!((tokens, of_portions.len()), (vec![64, 64, 64, 9], 5), "and the work of the mask");
    assert_eq!(may_follow(&mut answer, ""), ["b"]);
    assert!(answer.advance(&ids("b")));
}

#[test]
fn without_work_drafts_are_not_looked_at() {
    let mut answer = follower("abcd");
    assert_eq!(
        fill(&mut answer, "abc", &mut |_| false),
        (Masked::Filled, vec![false, true, true, true])
    );
    let mut left = 2;
    let two = fill(&mut answer, "abc", &mut |_| {
        left -= 1;
        left > 0
    });
    assert_eq!(two, (Masked::Filled, vec![false, false, true, true]));
    assert_eq!(may_follow(&mut answer, "abc"), ["a", "b", "c", "d"], "nothing was taken");
}

#[test]
fn the_work_of_a_mask_is_told_and_a_second_one_is_less() {
    let mut answer = follower("([a-z]{3,9} ){20}");
    let mut of_first = 0;
    fill(&mut answer, "", &mut |work| {
        of_first += work;
        true
    });
    answer.advance(&ids("a"));
    assert!((100..MASK_WORK).contains(&of_first), "{of_first}");
    let mut again = follower("a");
    let mut of_one = 0;
    fill(&mut again, "", &mut |work| {
        of_one += work;
        true
    });
    assert!(of_one < of_first, "{of_one} {of_first}");
}

fn vocabulary() -> GrammarTokens {
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    words.push(b"\xffe".to_vec());
    GrammarTokens::new(&words, &[256]).unwrap()
}

#[test]
fn memory_is_counted_as_answers_grow_and_given_back_as_they_end() {
    let tokens = vocabulary();
    let memory = Arc::clone(tokens.memory());
    assert_eq!(memory.bytes(), 0);
    let compiled = tokens.compile(&regex("([a-z]{1,9}[0-9]){1,400}")).unwrap();
    let of_grammar = memory.bytes();
    assert!(of_grammar > 0);
    let mut answer = compiled.follower();
    let before = memory.bytes();
    assert!(before > of_grammar);
    for _ in 0..200 {
        fill(&mut answer, "", &mut |_| true);
        answer.advance(&ids("ab1"));
    }
    fill(&mut answer, "", &mut |_| true);
    assert!(memory.bytes() > before + 600 * 128, "{} after {before}", memory.bytes());
    let grown = memory.bytes();
    assert_eq!(answer.bytes(), grown);
    drop(answer);
    assert!(memory.bytes() < grown && memory.bytes() >= of_grammar);
    drop(compiled);
    assert_eq!(memory.bytes(), 0);
}

#[test]
fn what_llguidance_does_not_tell_is_counted_by_the_source_and_the_items_of_a_mask() {
    let of_source = |source: &str| {
        let grammar = Grammar { kind: GrammarKind::Lark, source: source.into() };
        vocabulary().compile(&grammar).unwrap().follower().bytes()
    };
    let short = of_source("start: /[a-z]+/");
    let long = of_source(&format!("start: /[a-z]+/\n// {}", "x".repeat(1_000)));
    assert_eq!(long - short, 64 * 1_004);
    let grown = |tokens, items| bytes_of_answer(tokens, items) - bytes_of_answer(0, items);
    assert_eq!((grown(10, 0), grown(10, 5)), (1_280, 1_280 + 10 * 5 * 16));
    assert_eq!(bytes_of_answer(0, 5), 64 << 10);
}

#[test]
fn the_oldest_of_what_nobody_uses_gives_way_and_what_is_put_again_takes_no_place() {
    let known: KnownGrammars<u32> = KnownGrammars::new(2);
    let names = ["a", "b", "c"].map(regex);
    known.put(names[0].clone(), Ok(Arc::new(0)));
    known.put(names[1].clone(), Ok(Arc::new(1)));
    known.put(names[1].clone(), Ok(Arc::new(7)));
    assert!(known.get(&names[0]).is_some(), "it is full, and nothing new came");
    let once = Cell::new(true);
    known.give_way(|| once.replace(false), |_| true);
    let there = names.map(|name| known.get(&name).is_some());
    assert_eq!(there, [true, false, false], "the other was used before it");
}

#[test]
fn an_answer_that_gives_way_fails_and_holds_nothing() {
    let tokens = vocabulary();
    let memory = Arc::clone(tokens.memory());
    let mut answer = tokens.compile(&regex("[a-z]+")).unwrap().follower();
    memory.bound(1, || {});
    assert!(answer.is_memory_exhausted() && memory.is_exhausted());
    answer.give_way();
    assert_eq!((memory.bytes(), answer.bytes()), (0, 0));
    assert!(!answer.advance(&ids("a")) && !answer.finished());
    assert_eq!(fill(&mut answer, "", &mut |_| true), (Masked::Filled, vec![true]));
    assert!(answer.error().unwrap().contains("memory"));
    assert_eq!(answer.count_allowed(&ids("a")), 0);
}

#[test]
fn what_nobody_uses_gives_way_first_and_a_quarter_is_left_to_grow() {
    let tokens = vocabulary();
    let memory = Arc::clone(tokens.memory());
    let known: Arc<KnownGrammars<Arc<Compiled>>> = Arc::new(KnownGrammars::new(9));
    let used = Arc::new(tokens.compile(&regex("a{1,50}")).unwrap());
    known.put(regex("a{1,50}"), Ok(Arc::new(Arc::clone(&used))));
    let of_used = memory.bytes();
    for source in ["b{1,50}", "c{1,50}"] {
        let compiled = tokens.compile(&regex(source)).unwrap();
        known.put(regex(source), Ok(Arc::new(Arc::new(compiled))));
    }
    let all = memory.bytes();
    assert!(all > 2 * of_used);
    let asked = Arc::new(AtomicUsize::new(0));
    let (weak, held, count) = (Arc::downgrade(&known), Arc::downgrade(&memory), Arc::clone(&asked));
    let relieve = move |most: u64| {
        let (known, held) = (weak.upgrade().unwrap(), held.upgrade().unwrap());
        count.fetch_add(1, Ordering::Relaxed);
        known.give_way(|| held.bytes() > most, |it| Arc::strong_count(it) == 1);
    };
    let most = all + 8;
    memory.bound(most, move || relieve(most / 2));
    assert!(!memory.is_exhausted());
    assert_eq!(asked.load(Ordering::Relaxed), 0, "there is room");
    assert!(memory.has_room(), "once what nobody uses is gone");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    assert!(known.get(&regex("b{1,50}")).is_none(), "the oldest of these");
    assert!(known.get(&regex("a{1,50}")).is_some(), "an answer has it");
    memory.bound(of_used, || {});
    known.give_way(|| true, |it| Arc::strong_count(it) == 1);
    assert_eq!(memory.bytes(), of_used);
    assert!(!memory.is_exhausted() && !memory.has_room());
    memory.bound(0, || panic!("there is no bound"));
    assert!(memory.has_room() && !memory.is_exhausted());
}
