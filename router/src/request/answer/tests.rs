//! What fits a context.

use super::*;

#[test]
fn a_prompt_leaves_room_for_its_answer_or_is_refused_with_both_numbers() {
    assert_eq!(check_context(10, None, 16).unwrap(), 6);
    assert_eq!(check_context(10, Some(6), 16).unwrap(), 6);
    assert_eq!(check_context(16, Some(0), 16).unwrap(), 0);
    for (prompt, max_tokens, needs) in [(16, None, 17), (10, Some(7), 17), (17, Some(0), 17)] {
        match check_context(prompt, max_tokens, 16) {
            Err(RouteError::ContextLength { got, limit: 16, .. }) => assert_eq!(got, needs),
            other => panic!("{other:?}"),
        }
    }
}
