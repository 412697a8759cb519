//! `json!` of serde_json in a third of its machine code. The document has two thousand keys; there each is a string, an insertion
//! and the drop of a value in place, a quarter of a megabyte in all. Here it is two calls.

use serde::Serialize;
use serde_json::{Map, Value};

/// A value in the form of JSON, with expressions in the place of values. There is no `null`.
macro_rules! json {
    (@object $object:ident) => {};
    (@object $object:ident $key:tt : { $($value:tt)* } $(, $($rest:tt)*)?) => {
        $crate::http::ops::openapi::json::put(&mut $object, $key, json!({ $($value)* }));
        $(json!(@object $object $($rest)*);)?
    };
    (@object $object:ident $key:tt : [ $($value:tt)* ] $(, $($rest:tt)*)?) => {
        $crate::http::ops::openapi::json::put(&mut $object, $key, json!([ $($value)* ]));
        $(json!(@object $object $($rest)*);)?
    };
    (@object $object:ident $key:tt : $value:expr $(, $($rest:tt)*)?) => {
        $crate::http::ops::openapi::json::put(&mut $object, $key, json!($value));
        $(json!(@object $object $($rest)*);)?
    };
    (@array $array:ident) => {};
    (@array $array:ident { $($value:tt)* } $(, $($rest:tt)*)?) => {
        $crate::http::ops::openapi::json::push(&mut $array, json!({ $($value)* }));
        $(json!(@array $array $($rest)*);)?
    };
    (@array $array:ident $value:expr $(, $($rest:tt)*)?) => {
        $crate::http::ops::openapi::json::push(&mut $array, json!($value));
        $(json!(@array $array $($rest)*);)?
    };
    ({ $($entries:tt)* }) => {{
        #[allow(unused_mut, reason = "there may be none")]
        let mut object = serde_json::Map::new();
        json!(@object object $($entries)*);
        serde_json::Value::Object(object)
    }};
    ([ $($items:tt)* ]) => {{
        #[allow(unused_mut, reason = "there may be none")]
        let mut array: Vec<serde_json::Value> = Vec::new();
        json!(@array array $($items)*);
        serde_json::Value::Array(array)
    }};
    ($value:expr) => {
        $crate::http::ops::openapi::json::value(&$value)
    };
}
pub(super) use json;

#[inline(never)]
pub(super) fn put(object: &mut Map<String, Value>, key: &str, value: Value) {
    object.insert(key.to_owned(), value);
}

#[inline(never)]
pub(super) fn push(array: &mut Vec<Value>, value: Value) {
    array.push(value);
}

/// Of texts, numbers and what has come of `json!`; a text where a value could not be JSON.
#[inline(never)]
pub(super) fn value<T: Serialize + ?Sized>(value: &T) -> Value {
    serde_json::to_value(value).unwrap_or_else(|error| error.to_string().into())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_is_what_serde_json_makes_of_the_same() {
        macro_rules! both {
            ($($json:tt)*) => {
                assert_eq!(json!($($json)*), serde_json::json!($($json)*))
            };
        }
        let (text, inner) = (String::from("a"), serde_json::json!({"b": [1]}));
        both!({});
        both!([]);
        both!("a");
        both!(-1.5);
        both!({"z": {"y": [], "x": {}}, "a": [{"b": 1}, [2, -3], "c"],});
        both!({"text": text, "inner": inner, "call": text.len() + 1, "none": None::<u8>});
        both!([text, inner, text.len(), {"a": true},]);
    }
}
