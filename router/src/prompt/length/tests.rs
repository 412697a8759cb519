use std::collections::HashMap;

use serde_json::json;
use tokenizers::normalizers::{NFC, NFD};
use tokenizers::{NormalizedString, Normalizer as _};

use super::*;

const BYTE_LEVEL: &str = include_str!("../../../../tests/data/tokenizer_byte_level.json");
const BYTE_FALLBACK: &str = include_str!("../../../../tests/data/tokenizer_byte_fallback.json");
const WORD_PIECE: &str = include_str!("../../../../tests/data/tokenizer_word_piece.json");

fn edited(json: &str, edit: impl FnOnce(&mut Value)) -> Tokenizer {
    let mut json: Value = serde_json::from_str(json).unwrap();
    edit(&mut json);
    json.to_string().parse().unwrap()
}

fn least(json: &str) -> LeastTokens {
    LeastTokens::new(&json.parse().unwrap())
}

#[test]
fn every_class_counts_by_its_own_longest_token() {
    let least = least(BYTE_LEVEL);
    assert!(least.most.iter().all(Option::is_some), "{least:?}");
    let digits = least.most[DIGIT].unwrap();
    assert!(digits < least.most_of_all.unwrap(), "{least:?}");
    assert_eq!(least.of(&"7".repeat(1_000)), 1_000_usize.div_ceil(digits));
    assert_eq!(least.of(""), 0);
}

#[test]
fn what_normalises_or_lacks_tokens_has_a_bound_nevertheless() {
    let with =
        |normalizer: Value| LeastTokens::new(&edited(BYTE_LEVEL, |t| t["normalizer"] = normalizer));
    // as in Qwen, DeepSeek-V3, Llama 2
    assert!(with(json!({"type": "NFC"})).most_of_all.is_some());
    assert_eq!(with(json!({"type": "Sequence", "normalizers": []})).most, least(BYTE_LEVEL).most);
    let fallback = least(BYTE_FALLBACK);
    assert!(fallback.most.iter().all(Option::is_some), "{fallback:?}");
    // as in the default model, whose vocabulary lacks some control characters
    let lacking = edited(BYTE_LEVEL, |t| {
        t["model"]["vocab"].as_object_mut().unwrap().remove("\u{106}").unwrap();
    });
    let lacking = LeastTokens::new(&lacking);
    assert_eq!(lacking.most, least(BYTE_LEVEL).most);
    assert_eq!(lacking.token_bytes(), MOST_TOKEN_BYTES);
}

#[test]
fn a_tokenizer_that_drops_or_fuses_text_is_held_to_our_own_bound() {
    let strip = edited(BYTE_LEVEL, |t| {
        t["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    });
    let regex = edited(BYTE_LEVEL, |t| {
        t["normalizer"] = json!({"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "});
    });
    assert_eq!(LeastTokens::new(&strip).most[SPACE], None);
    for least in [LeastTokens::new(&regex), least(WORD_PIECE)] {
        assert_eq!(least.most, [None; CLASSES]);
        assert_eq!(least.of(&"a".repeat(MOST_TOKEN_BYTES * 7)), 7);
    }
}

#[test]
fn tokens_that_swallow_white_space_leave_letters_and_digits_their_bound() {
    let strips = edited(BYTE_LEVEL, |t| t["added_tokens"][1]["rstrip"] = json!(true));
    let least = LeastTokens::new(&strips);
    assert_eq!((least.most[SPACE], least.most_of_all), (None, None));
    assert!(least.most[LETTER].is_some() && least.most[DIGIT].is_some());
}

/// What composing makes of a text is never less than a quarter of its counted bytes: the longest spelling of each
/// composed character is put together from the longest of all characters that decompose to one of its parts.
#[test]
fn nfc_shrinks_nothing_to_less_than_a_quarter() {
    let normal = |normalizer: &dyn Fn(&mut NormalizedString), text: String| {
        let mut normalized = NormalizedString::from(text);
        normalizer(&mut normalized);
        normalized.get().to_owned()
    };
    let nfd = |text: String| normal(&|n| NFD.normalize(n).unwrap(), text);
    let nfc = |text: String| normal(&|n| NFC.normalize(n).unwrap(), text);
    let counted = |text: &str| text.bytes().filter(|b| class(*b).is_some()).count();
    let mut longest: HashMap<char, usize> = HashMap::new();
    let mut whole = Vec::new();
    for c in '\u{1}'..'\u{30000}' {
        // beyond are ideographs of one kind, private use, and no compositions
        let parts: Vec<char> = nfd(c.to_string()).chars().collect();
        if let [part] = parts[..] {
            let longest = longest.entry(part).or_default();
            *longest = counted(&c.to_string()).max(*longest);
        }
        if parts.len() > 1 || nfc(c.to_string()) == c.to_string() {
            whole.push((c, parts));
        }
    }
    let mut checked = 0;
    for (c, parts) in whole {
        let spelled: usize = parts.iter().map(|part| longest[part]).sum();
        let own = counted(&c.to_string());
        assert!(own <= spelled, "{c:?}: longer than its parts");
        let composed = counted(&nfc(c.to_string()));
        assert!(spelled <= NFC_SHRINKS * composed, "{c:?}: {spelled} to {composed}");
        checked += 1;
    }
    assert!(checked > 100_000);
}

#[test]
fn a_look_at_a_long_text_ends_where_it_is_clear_and_never_says_more_than_there_is() {
    let least = least(BYTE_LEVEL);
    let fits = "é7 ".repeat(FIRST_LOOK / 2);
    let all = least.of(&fits);
    assert_eq!(least.beyond(&fits, all), None);
    assert_eq!(least.beyond(&fits, all - 1), Some(all));
    let long = "é7 ".repeat(FIRST_LOOK * 2);
    let beyond = least.beyond(&long, 1_000).unwrap();
    assert!(beyond > 1_000 && beyond <= least.of(&long[..4 * FIRST_LOOK]), "{beyond}");
    assert_eq!(least.beyond("", 0), None);
}
