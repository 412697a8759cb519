//! Which characters are letters, numbers, marks, white space: asked of the regular expressions that `tokenizers` itself
//! runs, so that both are of one version of Unicode.

use std::sync::OnceLock;

use tokenizers::utils::SysRegex;

/// `\p{L}`
pub(super) const LETTER: u16 = 1;
/// `\p{N}`
pub(super) const NUMBER: u16 = 1 << 1;
/// `\s`
pub(super) const SPACE: u16 = 1 << 2;
/// `[\r\n]`, which are white space, too.
pub(super) const NEWLINE: u16 = 1 << 3;
/// `[^\s\p{L}\p{N}]`
pub(super) const OTHER: u16 = 1 << 4;
/// `\p{M}`, which are others, too.
pub(super) const MARK: u16 = 1 << 5;
/// `[\p{P}\p{S}]`, which are others, too.
pub(super) const SYMBOL: u16 = 1 << 6;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
pub(super) const CAPITAL: u16 = 1 << 7;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
pub(super) const SMALL: u16 = 1 << 8;
/// What the pre-tokenizer `Digits` takes for one.
pub(super) const DIGIT: u16 = 1 << 9;
/// Ideographs and kana, as DeepSeek-V3 sets them apart.
pub(super) const IDEOGRAPH: u16 = 1 << 10;
/// No text that consists of such characters is changed by NFC.
pub(super) const COMPOSED: u16 = 1 << 11;

/// The classes of every character.
#[derive(Debug)]
pub(super) struct Classes {
    pub(super) ascii: [u16; 128],
    /// By the upper bits of a character: which of `blocks` has it.
    pages: Vec<u16>,
    blocks: Vec<[u16; 256]>,
}

/// Where characters are looked for: Unicode has assigned nothing in the planes between but what is in none of the classes.
const ASSIGNED: [std::ops::Range<u32>; 2] = [0..0x4_0000, 0xE_0000..0xE_1000];

/// Scripts, punctuation and signs that are neither composed of others nor compose with what stands before them.
const COMPOSED_RANGES: [(u32, u32); 22] = [
    (0, 0x2FF),       // Latin
    (0x391, 0x3A1),   // Greek
    (0x3A3, 0x3CE),   // Greek
    (0x400, 0x482),   // Cyrillic
    (0x48A, 0x52F),   // Cyrillic
    (0x5D0, 0x5EA),   // Hebrew
    (0x61B, 0x64A),   // Arabic
    (0x660, 0x66F),   // Arabic
    (0x904, 0x928),   // Devanagari
    (0x93D, 0x940),   // Devanagari
    (0xE01, 0xE37),   // Thai
    (0x2002, 0x2027), // punctuation
    (0x202F, 0x205E), // punctuation
    (0x20A0, 0x20BF), // currencies
    (0x2190, 0x21FF), // arrows
    (0x2500, 0x27BF), // boxes, signs
    (0x3000, 0x3029), // ideographic punctuation
    (0x3041, 0x3096), // kana
    (0x30A0, 0x30FF), // kana
    (0x4E00, 0x9FFF), // ideographs
    (0xAC00, 0xD7A3), // Hangul
    (0xFF01, 0xFF9D), // full-width forms
];
/// Emoji.
const COMPOSED_EMOJI: std::ops::RangeInclusive<u32> = 0x1_F300..=0x1_FAFF;

impl Classes {
    /// The classes; found by the first call, within a tenth of a second.
    ///
    /// # Errors
    /// The regular expressions do not know them.
    pub(super) fn get() -> Result<&'static Self, &'static str> {
        static CLASSES: OnceLock<Option<Classes>> = OnceLock::new();
        CLASSES.get_or_init(Self::find).as_ref().ok_or("classes of characters are not known")
    }

    /// Of a character.
    pub(super) fn of(&self, c: u32) -> u16 {
        let page = self.pages.get((c >> 8) as usize).copied().unwrap_or(0);
        self.blocks[usize::from(page)][(c & 0xFF) as usize]
    }

    fn find() -> Option<Self> {
        let all: String = ASSIGNED.into_iter().flatten().filter_map(char::from_u32).collect();
        let mut found = vec![0_u16; 0x11_0000];
        for (pattern, class) in [
            (r"\p{L}+", LETTER),
            (r"\p{N}+", NUMBER),
            (r"\s+", SPACE),
            (r"[\r\n]+", NEWLINE),
            (r"\p{M}+", MARK),
            (r"[\p{P}\p{S}]+", SYMBOL),
            (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+", CAPITAL),
            (r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+", SMALL),
        ] {
            for (start, end) in SysRegex::new(pattern).ok()?.find_iter(&all) {
                all[start..end].chars().for_each(|c| found[c as usize] |= class);
            }
        }
        let composed = |c: u32| {
            COMPOSED_EMOJI.contains(&c)
                || COMPOSED_RANGES.iter().any(|(first, last)| (*first..=*last).contains(&c))
        };
        for (code, class) in (0..).zip(&mut found) {
            if *class & (SPACE | LETTER | NUMBER) == 0 {
                *class |= OTHER;
            }
            let ideograph = matches!(code, 0x4E00..=0x9FA5 | 0x3040..=0x30FF);
            *class |= if ideograph { IDEOGRAPH } else { 0 };
            let digit = char::from_u32(code).is_some_and(char::is_numeric);
            *class |= if digit { DIGIT } else { 0 };
            *class |= if composed(code) { COMPOSED } else { 0 };
        }
        let mut this = Self { ascii: [0; 128], pages: Vec::new(), blocks: Vec::new() };
        this.ascii.copy_from_slice(&found[..128]);
        for block in found.chunks_exact(256) {
            let known = this.blocks.iter().rev().position(|other| other == block);
            let at = match known {
                Some(back) => this.blocks.len() - 1 - back,
                None => {
                    this.blocks.push(block.try_into().ok()?);
                    this.blocks.len() - 1
                }
            };
            this.pages.push(u16::try_from(at).ok()?);
        }
        Some(this)
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::NormalizedString;

    use super::*;

    #[test]
    fn what_nfc_leaves_as_it_is_is_known() {
        let classes = Classes::get().unwrap();
        let (mut followers, mut composed) = (Vec::new(), Vec::new());
        for c in (0..0x11_0000).filter_map(char::from_u32) {
            let mut text = NormalizedString::from(c.to_string());
            followers.extend(text.nfd().get().chars().skip(1));
            if classes.of(c as u32) & COMPOSED != 0 {
                composed.push(c);
                assert_eq!(NormalizedString::from(c.to_string()).nfc().get(), c.to_string());
            }
        }
        // nothing of them is what others are composed of, but for their first characters
        for follower in followers {
            assert_eq!(classes.of(follower as u32) & COMPOSED, 0, "{follower:?}");
        }
        let text: String = composed.iter().collect();
        assert_eq!(NormalizedString::from(text.as_str()).nfc().get(), text);
        let reversed: String = composed.iter().rev().collect();
        assert_eq!(NormalizedString::from(reversed.as_str()).nfc().get(), reversed);
    }

    #[test]
    fn every_character_has_the_classes_that_the_regular_expressions_give_it() {
        let classes = Classes::get().unwrap();
        for (pattern, class) in [
            (r"\p{L}", LETTER),
            (r"\p{N}", NUMBER),
            (r"\s", SPACE),
            (r"[^\s\p{L}\p{N}]", OTHER),
            (r"\p{M}", MARK),
            (r"[\p{P}\p{S}]", SYMBOL),
        ] {
            let all: String = (0..0x11_0000).filter_map(char::from_u32).collect();
            let regex = SysRegex::new(pattern).unwrap();
            let mut matched = regex.find_iter(&all).map(|(start, _)| start).peekable();
            for (at, c) in all.char_indices() {
                let expected = matched.next_if_eq(&at).is_some();
                assert_eq!(classes.of(c as u32) & class != 0, expected, "{c:?} {pattern}");
            }
        }
    }
}
