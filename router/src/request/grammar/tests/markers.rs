//! Reasoning whose markers are texts of several tokens, or stand between special tokens.

use std::sync::Arc;

use super::super::*;
use crate::core::frame::{Grammar, GrammarKind, Reasoning};

/// A vocabulary that cuts markers in several ways.
struct Model {
    words: Vec<&'static str>,
    tokens: Arc<GrammarTokens>,
}

const THINK: [&str; 16] = [
    "<", "/", ">", "think", "</", "</think", ">\n", "t", "h", "i", "n", "k", "a", "b", ">a",
    "\u{ff}",
];
const HARMONY: [&str; 25] = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "analysis",
    "r",
    "assistant",
    "final",
    "commentary",
    "fin",
    "al",
    "a",
    "b",
    "s",
    "i",
    "t",
    "n",
    "f",
    "l",
    "y",
    "c",
    "o",
    "m",
    "e",
];

fn model(words: &[&'static str]) -> Model {
    let bytes = words.iter().map(|word| match word.strip_prefix("<|") {
        Some(_) => [b"\xff", word.as_bytes()].concat(),
        None => word.as_bytes().to_vec(),
    });
    let mut bytes: Vec<Vec<u8>> = bytes.collect();
    bytes.push(b"\xffend".to_vec());
    let end = u32::try_from(words.len()).unwrap();
    let tokens = GrammarTokens::new(&bytes, &[end]).unwrap();
    Model { words: words.to_vec(), tokens: Arc::new(tokens) }
}

impl Model {
    fn id(&self, word: &str) -> u32 {
        let place = self.words.iter().position(|it| *it == word);
        u32::try_from(place.unwrap_or_else(|| panic!("no token {word:?}"))).unwrap()
    }

    fn ids(&self, words: &[&str]) -> Vec<u32> {
        words.iter().map(|word| self.id(word)).collect()
    }

    fn end(&self) -> u32 {
        u32::try_from(self.words.len()).unwrap()
    }

    fn follower(&self, reasoning: &Reasoning, grammar: Option<&str>) -> Follower {
        let rules = ReasoningRules::new(reasoning, Some(Arc::clone(&self.tokens))).unwrap();
        let follower = grammar.map_or_else(Follower::free, |source| {
            let grammar = Grammar { kind: GrammarKind::Regex, source: source.into() };
            self.tokens.compile(&grammar).unwrap().follower()
        });
        follower.reasoning(Arc::new(rules))
    }

    /// What may come next.
    fn next(&self, follower: &mut Follower) -> Vec<&'static str> {
        let (mut mask, mut dead) = (vec![0; self.tokens.mask_words()], [false]);
        let filled = follower.fill_masks(&[], &mut mask, &mut dead, &mut |_| true);
        assert_eq!(filled, Masked::Filled);
        assert!(!dead[0], "{:?}", follower.error());
        let allowed = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
        let named = |id: u32| self.words.get(id as usize).copied().unwrap_or("END");
        let found: Vec<u32> = (0..=self.end()).filter(allowed).collect();
        for id in &found {
            assert_eq!(follower.count_allowed(&[*id]), 1, "{}", named(*id));
        }
        for id in (0..=self.end()).filter(|id| !found.contains(id)) {
            assert_eq!(follower.count_allowed(&[id]), 0, "{}", named(id));
        }
        found.into_iter().map(named).collect()
    }

    fn all_but(&self, without: &[&str]) -> Vec<&'static str> {
        let words = self.words.iter().copied().chain(["END"]);
        words.filter(|word| !without.contains(word)).collect()
    }
}

fn think(model: &Model, max_tokens: Option<u32>) -> Reasoning {
    let end = model.ids(&["<", "/", "t", "h", "i", "n", "k", ">"]);
    let begin = model.ids(&["<", "t", "h", "i", "n", "k", ">"]);
    Reasoning { begin, end, max_tokens, ..Reasoning::default() }
}

fn opened(reasoning: Reasoning) -> Reasoning {
    Reasoning { begin: vec![], ..reasoning }
}

#[test]
fn a_text_ends_reasoning_in_whatever_tokens_it_is_written() {
    let model = model(&THINK);
    for words in [
        &["</think", ">"][..],
        &["<", "/", "think", ">"],
        &["</", "t", "h", "i", "n", "k", ">"],
        &["a", "<", "</", "think", ">"],
        &["</think", "a", "</think", ">"],
    ] {
        let mut answer = model.follower(&opened(think(&model, None)), Some("ab"));
        let (last, before) = words.split_last().unwrap();
        assert!(!answer.advance(&model.ids(before)));
        let inside = model.next(&mut answer);
        assert!(inside.contains(&"b") && !inside.contains(&"END"), "{words:?}: {inside:?}");
        answer.advance(&model.ids(&[*last]));
        assert_eq!(model.next(&mut answer), ["a"], "{words:?}");
        assert!(answer.advance(&model.ids(&["a", "b"])));
    }
}

#[test]
fn no_token_ends_reasoning_and_begins_the_answer() {
    let model = model(&THINK);
    let mut answer = model.follower(&opened(think(&model, None)), Some("ab"));
    assert_eq!(model.next(&mut answer), model.all_but(&["END"]));
    answer.advance(&model.ids(&["</think"]));
    assert_eq!(model.next(&mut answer), model.all_but(&["END", ">\n", ">a"]));
    let mut free = model.follower(&opened(think(&model, Some(9))), None);
    free.advance(&model.ids(&["</think"]));
    assert_eq!(model.next(&mut free), model.all_but(&[]), "without a grammar it does no harm");
    free.advance(&model.ids(&[">a"]));
    assert_eq!(model.next(&mut free), model.all_but(&[]));
}

#[test]
fn a_used_up_budget_forces_what_the_text_lacks_in_the_longest_tokens() {
    let model = model(&THINK);
    for grammar in [None, Some("ab")] {
        for (said, forced) in [
            (&["a", "a"][..], &["</think", ">"][..]),
            (&["a", "<"], &["/", "think", ">"]),
            (&["</", "t"], &["h", "i", "n", "k", ">"]),
            (&["</think", "<"], &["/", "think", ">"]),
        ] {
            let mut answer = model.follower(&opened(think(&model, Some(2))), grammar);
            answer.advance(&model.ids(said));
            for word in forced {
                assert_eq!(model.next(&mut answer), [*word], "{said:?}");
                answer.advance(&model.ids(&[*word]));
            }
            let want = if grammar.is_some() { vec!["a"] } else { model.all_but(&[]) };
            assert_eq!(model.next(&mut answer), want);
        }
    }
    let mut none = model.follower(&opened(think(&model, Some(0))), None);
    assert_eq!(model.next(&mut none), ["</think"]);
}

#[test]
fn a_text_opens_reasoning_if_the_answer_begins_with_it() {
    let model = model(&THINK);
    let mut answer = model.follower(&think(&model, Some(1)), Some("ab"));
    assert_eq!(model.next(&mut answer), ["<", "a"]);
    answer.advance(&model.ids(&["<"]));
    assert_eq!(model.next(&mut answer), ["think", "t"]);
    answer.advance(&model.ids(&["t"]));
    assert_eq!(model.next(&mut answer), ["h"]);
    answer.advance(&model.ids(&["h", "i", "n", "k", ">"]));
    assert_eq!(model.next(&mut answer), model.all_but(&["END"]), "none of it is used");
    answer.advance(&model.ids(&["b", "</think", ">"]));
    assert_eq!(model.next(&mut answer), ["a"]);
    let mut at_once = model.follower(&think(&model, Some(1)), Some("ab"));
    at_once.advance(&model.ids(&["a"]));
    assert_eq!(model.next(&mut at_once), ["b"]);
}

#[test]
fn an_answer_may_begin_like_a_marker_and_the_grammar_has_taken_its_tokens() {
    let model = model(&THINK);
    let grammar = Some("<(ab|thb|t)");
    for (said, next) in [
        (&[][..], &["<"][..]),
        (&["<"], &["think", "t", "a"]),
        (&["<", "a"], &["b"]),
        (&["<", "t"], &["h"]),
        (&["<", "t", "h"], &["i", "b"]),
        (&["<", "t", "h", "i"], &["n"]),
        (&["<", "think"], &[">"]),
    ] {
        let mut answer = model.follower(&think(&model, None), grammar);
        assert!(!answer.advance(&model.ids(said)), "{said:?}");
        let found = model.next(&mut answer);
        let found: Vec<&str> = found.into_iter().filter(|word| *word != "END").collect();
        assert_eq!(found, next, "{said:?}");
    }
    let mut answers = model.follower(&think(&model, None), grammar);
    assert!(answers.advance(&model.ids(&["<", "t", "h", "b"])), "it is complete");
    let mut thinks = model.follower(&think(&model, Some(1)), grammar);
    thinks.advance(&model.ids(&["<", "t", "h", "i", "n", "k", ">", "a"]));
    assert_eq!(model.next(&mut thinks), ["</think"]);
    thinks.advance(&model.ids(&["</think", ">"]));
    assert_eq!(model.next(&mut thinks), ["<"], "the grammar begins anew");
    assert!(thinks.advance(&model.ids(&["<", "a", "b"])));
}

#[test]
fn what_begins_a_marker_is_no_answer_if_the_grammar_does_not_begin_so() {
    let model = model(&THINK);
    let mut answer = model.follower(&think(&model, None), Some("a+"));
    answer.advance(&model.ids(&["<", "a"]));
    let (mut mask, mut dead) = (vec![0; model.tokens.mask_words()], [false]);
    answer.fill_masks(&[], &mut mask, &mut dead, &mut |_| true);
    assert!(dead[0] && !answer.finished(), "nobody may have chosen it");
}

#[test]
fn an_answer_that_may_yet_be_a_marker_is_not_complete() {
    let model = model(&THINK);
    let mut answer = model.follower(&think(&model, None), Some("<"));
    assert!(!answer.advance(&model.ids(&["<"])) && !answer.finished());
    answer.advance(&model.ids(&["think", ">", "b", "</think", ">"]));
    assert!(!answer.finished());
    assert!(answer.advance(&model.ids(&["<"])));
}

#[test]
fn drafts_are_not_looked_at_while_it_is_open_whether_the_answer_reasons() {
    let model = model(&THINK);
    let drafts = model.ids(&["a", "b"]);
    let mut answer = model.follower(&think(&model, None), Some("ab+"));
    let (mut masks, mut dead) = (vec![0; 3 * model.tokens.mask_words()], [false; 3]);
    answer.fill_masks(&drafts, &mut masks, &mut dead, &mut |_| true);
    assert_eq!((dead, answer.count_allowed(&drafts)), ([false, true, true], 1));
    answer.advance(&drafts[..1]);
    let drafts = model.ids(&["b", "b"]);
    answer.fill_masks(&drafts, &mut masks, &mut dead, &mut |_| true);
    assert_eq!((dead, answer.count_allowed(&drafts)), ([false; 3], 2));
}

#[test]
fn a_prompt_may_end_in_the_beginning_of_either_end_and_a_whole_end_begins_nothing() {
    let model = model(&THINK);
    let begun = |reasoning: Reasoning, begun| Reasoning { begin: vec![], begun, ..reasoning };
    let too = Reasoning { ends_too: model.ids(&["<", "a"]), ..think(&model, None) };
    let mut answer = model.follower(&begun(too, 1), Some("ab"));
    answer.advance(&model.ids(&["a"]));
    assert_eq!(model.next(&mut answer), ["a"], "the other end");
    let all = u32::try_from(think(&model, None).end.len()).unwrap();
    let mut reasons = model.follower(&begun(think(&model, None), all), Some("ab"));
    reasons.advance(&model.ids(&["a", "</think"]));
    assert_eq!(model.next(&mut reasons), model.all_but(&["END", ">\n", ">a"]));
    let mut none = model.follower(&begun(think(&model, Some(0)), all), Some("ab"));
    assert_eq!(model.next(&mut none), ["</think"], "the budget is used up");
}

#[test]
fn an_answer_without_a_grammar_may_begin_like_a_marker() {
    let model = model(&THINK);
    let mut answer = model.follower(&think(&model, Some(0)), None);
    answer.advance(&model.ids(&["<"]));
    assert_eq!(model.next(&mut answer), model.all_but(&[]));
    answer.advance(&model.ids(&["a"]));
    assert_eq!(model.next(&mut answer), model.all_but(&[]), "it is no reasoning");
    let mut thinks = model.follower(&think(&model, Some(0)), None);
    thinks.advance(&model.ids(&["<", "think", ">\n"]));
    assert_eq!(model.next(&mut thinks), ["</think"], "what follows the marker is in it");
}

/// The prompt ends in `<|start|>assistant`.
fn channels(model: &Model, max_tokens: Option<u32>) -> Reasoning {
    let spelled = |word: &str| -> Vec<u32> {
        word.char_indices().map(|(at, c)| model.id(&word[at..at + c.len_utf8()])).collect()
    };
    let special = |word: &str| vec![model.id(word)];
    let head = [special("<|end|>"), special("<|start|>"), spelled("assistant")].concat();
    let end = [head.clone(), special("<|channel|>"), spelled("final"), special("<|message|>")];
    Reasoning {
        begin: [special("<|channel|>"), spelled("analysis"), special("<|message|>")].concat(),
        end: end.concat(),
        max_tokens,
        begun: u32::try_from(head.len()).unwrap(),
        ends_too: [special("<|channel|>"), spelled("commentary")].concat(),
    }
}

const ANALYSIS: [&str; 3] = ["<|channel|>", "analysis", "<|message|>"];

#[test]
fn only_a_final_message_is_the_answer() {
    let model = model(&HARMONY);
    let channels = Reasoning { ends_too: vec![], ..channels(&model, None) };
    for before in [
        &[][..],
        &["<|channel|>", "analysis", "<|message|>", "b", "<|end|>", "<|start|>", "assistant"],
        &["<|channel|>", "commentary", "<|message|>", "b", "<|end|>", "<|start|>", "assistant"],
        &[
            "<|channel|>",
            "analysis",
            "<|message|>",
            "b",
            "<|end|>",
            "<|start|>",
            "a",
            "s",
            "s",
            "i",
            "s",
            "t",
            "a",
            "n",
            "t",
        ],
    ] {
        let mut answer = model.follower(&channels, Some("ab"));
        answer.advance(&model.ids(before));
        assert_eq!(model.next(&mut answer), model.all_but(&["END"]), "{before:?}");
        answer.advance(&model.ids(&["<|channel|>", "fin"]));
        assert_eq!(model.next(&mut answer), model.all_but(&["END"]));
        answer.advance(&model.ids(&["al"]));
        assert_eq!(model.next(&mut answer), ["<|message|>"], "no other head is the answer's");
        answer.advance(&model.ids(&["<|message|>"]));
        assert_eq!(model.next(&mut answer), ["a"]);
    }
}

#[test]
fn a_budget_counts_what_is_in_messages_but_not_the_first_head() {
    let model = model(&HARMONY);
    let tail = ["<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>"];
    for (most, said) in [(1, &["b"][..]), (3, &["b", "b", "b"]), (2, &["b", "<|end|>"])] {
        let mut answer = model.follower(&channels(&model, Some(most)), Some("ab"));
        answer.advance(&model.ids(&ANALYSIS));
        assert_eq!(model.next(&mut answer), model.all_but(&["END"]));
        answer.advance(&model.ids(said));
        let from = usize::from(said.ends_with(&["<|end|>"]));
        for word in &tail[from..] {
            assert_eq!(model.next(&mut answer), [*word], "{most} {said:?}");
            answer.advance(&model.ids(&[*word]));
        }
        assert_eq!(model.next(&mut answer), ["a"]);
    }
    let mut none = model.follower(&channels(&model, Some(0)), None);
    for word in &tail[3..] {
        assert_eq!(model.next(&mut none), [*word]);
        none.advance(&model.ids(&[*word]));
    }
    assert_eq!(model.next(&mut none), model.all_but(&[]));
}

#[test]
fn a_call_ends_the_reasoning_too_and_is_never_cut() {
    let model = model(&HARMONY);
    let mut answer = model.follower(&channels(&model, Some(2)), None);
    answer.advance(&model.ids(&ANALYSIS));
    answer.advance(&model.ids(&["b", "<|end|>"]));
    assert_eq!(model.next(&mut answer), ["<|start|>"], "the budget is used up");
    let mut calls = model.follower(&channels(&model, Some(9)), None);
    calls.advance(&model.ids(&["<|channel|>", "commentary"]));
    calls.advance(&model.ids(&["b"; 20]));
    assert_eq!(model.next(&mut calls), model.all_but(&[]));
}

#[test]
fn a_marker_cut_anywhere_goes_on_the_same() {
    let model = model(&HARMONY);
    let words = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "b",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "final",
        "<|message|>",
        "a",
        "b",
    ];
    let ids = model.ids(&words);
    for at in 0..ids.len() {
        let mut whole = model.follower(&channels(&model, Some(1)), Some("ab+"));
        let mut resumed = model.follower(&channels(&model, Some(1)), Some("ab+"));
        for id in &ids[..at] {
            whole.advance(&[*id]);
        }
        resumed.advance_later(ids[..at].to_vec());
        assert_eq!(model.next(&mut resumed), model.next(&mut whole), "{at}");
    }
}

#[test]
fn a_marker_that_no_tokens_write_is_refused() {
    let model = model(&["<", "a"]);
    let end = vec![model.id("<"), model.id("a")];
    let reasoning = Reasoning { end, ..Reasoning::default() };
    assert!(ReasoningRules::new(&reasoning, Some(Arc::clone(&model.tokens))).is_some());
    let text = GrammarTokens::new(&[b"<>".to_vec(), b">".to_vec()], &[]).unwrap();
    let reasoning = Reasoning { end: vec![0], ..Reasoning::default() };
    assert!(ReasoningRules::new(&reasoning, Some(Arc::new(text))).is_some());
    let text = GrammarTokens::new(&[b"<>a".to_vec(), b">".to_vec()], &[]).unwrap();
    assert!(ReasoningRules::new(&reasoning, Some(Arc::new(text))).is_none(), "from its middle");
}
