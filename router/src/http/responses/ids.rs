//! Ids of a response and of its items. That of an item says which response it is of, so that a reference finds it.

use crate::http::parse::ids;

const RESPONSE: &str = "resp_";

/// Ids of one response.
#[derive(Debug, Clone)]
pub(super) struct ResponseIds {
    /// 32 hexadecimal digits.
    digits: String,
}

impl ResponseIds {
    pub(super) fn new() -> Self {
        Self { digits: ids::name("") }
    }

    pub(super) fn response(&self) -> String {
        format!("{RESPONSE}{}", self.digits)
    }

    /// Of an output item.
    pub(super) fn item(&self, prefix: &str, index: usize) -> String {
        format!("{prefix}_{}_{index}", self.digits)
    }

    /// Of an item of the request.
    pub(super) fn input_item(&self, prefix: &str, index: usize) -> String {
        format!("{prefix}_{}_in{index}", self.digits)
    }

    /// The id of the response that has this output item.
    pub(super) fn response_of(item: &str) -> Option<String> {
        let (_, rest) = item.split_once('_')?;
        let (digits, _) = rest.split_once('_')?;
        Some(format!("{RESPONSE}{digits}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_knows_its_response() {
        let ids = ResponseIds::new();
        let item = ids.item("msg", 3);
        assert_eq!(ResponseIds::response_of(&item), Some(ids.response()));
        assert_eq!(ResponseIds::response_of("msg_1"), None);
        assert_ne!(ids.input_item("msg", 3), item);
    }
}
