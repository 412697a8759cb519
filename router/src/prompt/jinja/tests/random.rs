//! Random templates: the same as minijinja renders, and whatever they do, within the bounds.

use std::panic::catch_unwind;

use proptest::prelude::*;

use super::same::given;
use super::{ErrorKind, grammar, oracle, render, small, within};

fn words(error: &str) -> &str {
    error.split(" (line").next().unwrap_or(error)
}

proptest! {
    #[test]
    fn random_templates_render_the_same(choices in prop::collection::vec(any::<u16>(), 0..120)) {
        let source = grammar::template(&mut grammar::Choices::new(&choices, false));
        let ours = render(&source, &given());
        // It has panics of its own, such as for `''[::-1]`.
        let theirs = catch_unwind(|| oracle::render(&source, &given()));
        let Ok(theirs) = theirs else { return Ok(()) };
        match (&ours, &theirs) {
            (Ok(ours), Ok(theirs)) => prop_assert_eq!(ours, theirs, "{}", source),
            // Lines are compared elsewhere: minijinja computes constants when it reads them, on the line of the first.
            (Err(ours), Err(theirs)) => prop_assert_eq!(words(ours), words(theirs), "{}", source),
            _ => prop_assert!(false, "{}\n  ours   {:?}\n  theirs {:?}", source, ours, theirs),
        }
    }

    #[test]
    fn random_templates_stay_in_their_bounds(choices in prop::collection::vec(any::<u16>(), 0..160)) {
        let source = grammar::template(&mut grammar::Choices::new(&choices, true));
        match within(small(), &source, &given()) {
            Ok(text) => prop_assert!(text.len() <= small().output),
            Err((ErrorKind::Spent(_), why)) => prop_assert!(!why.is_empty()),
            Err((_, why)) => prop_assert!(!why.contains("panic"), "{}: {}", source, why),
        }
    }
}
