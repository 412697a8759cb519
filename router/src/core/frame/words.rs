//! Closed sets of words: enums whose variants stand on the wire as text.

/// An enum of this protocol version. A word that is not in [`ALL`](Self::ALL) is no frame, and closes the link by name.
pub trait Word: Copy + 'static {
    /// Every variant, in order of declaration.
    const ALL: &'static [Self];

    /// The word on the wire, in metrics and in answers.
    fn as_str(self) -> &'static str;

    /// The variant of a word.
    #[must_use]
    fn named(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|known| known.as_str() == word)
    }
}

/// Declares such enums: each word is written once.
macro_rules! words {
    ($($(#[$about:meta])* $name:ident { $($(#[$why:meta])* $variant:ident = $word:literal,)* })*) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$why])* #[serde(rename = $word)] $variant,)*
        }

        impl $crate::core::frame::Word for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)*];

            fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str($crate::core::frame::Word::as_str(*self))
            }
        }
    )*};
}

pub(super) use words;
