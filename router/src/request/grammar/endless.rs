//! Schemas that no value fits because every value would hold another one like it: an answer to them would never end.

use serde_json::Value;

/// Schemas that are looked at, and how deep: what is larger is taken to have an end. A guess.
const MAX_STEPS: u32 = 20_000;
const MAX_DEPTH: usize = 256;

/// The place below `schema` from where every value goes on for ever; `None` where some value ends.
#[must_use]
pub fn endless(schema: &Value) -> Option<String> {
    Walk { root: schema, open: vec!["#"], steps: 0, depth: 0 }.of(schema, "")
}

struct Walk<'a> {
    root: &'a Value,
    /// Places that the present value is within.
    open: Vec<&'a str>,
    steps: u32,
    depth: usize,
}

impl<'a> Walk<'a> {
    fn of(&mut self, schema: &'a Value, path: &str) -> Option<String> {
        self.steps += 1;
        if self.steps > MAX_STEPS || self.depth > MAX_DEPTH || !schema.is_object() {
            return None;
        }
        self.depth += 1;
        let found = self.of_object(schema, path);
        self.depth -= 1;
        found
    }

    fn of_object(&mut self, schema: &'a Value, path: &str) -> Option<String> {
        if schema.get("enum").is_some() || schema.get("const").is_some() {
            return None;
        }
        if let Some(place) = schema["$ref"].as_str() {
            if self.open.contains(&place) {
                return Some(path.to_owned());
            }
            if let Some(target) = place.strip_prefix('#').and_then(|at| self.root.pointer(at)) {
                self.open.push(place);
                let found = self.of(target, path);
                self.open.pop();
                if found.is_some() {
                    return found;
                }
            }
        }
        let list = |key: &str| schema[key].as_array().into_iter().flatten().enumerate();
        for (at, one) in list("allOf") {
            if let Some(found) = self.of(one, &format!("{path}.allOf[{at}]")) {
                return Some(found);
            }
        }
        for key in ["anyOf", "oneOf"] {
            let all: Vec<Option<String>> =
                list(key).map(|(at, one)| self.of(one, &format!("{path}.{key}[{at}]"))).collect();
            if let Some(Some(first)) = all.first()
                && all.iter().all(Option::is_some)
            {
                return Some(first.clone());
            }
        }
        let only = |kind: &str| {
            let kinds = &schema["type"];
            kinds == kind || kinds.as_array().is_some_and(|all| all.len() == 1 && all[0] == kind)
        };
        if only("object") {
            return list("required").filter_map(|(_, name)| name.as_str()).find_map(|name| {
                match schema["properties"].get(name) {
                    Some(one) => self.of(one, &format!("{path}.properties.{name}")),
                    None => self.of(&schema["additionalProperties"], &format!("{path}.required")),
                }
            });
        }
        if only("array") {
            let least = usize::try_from(schema["minItems"].as_u64().unwrap_or(0)).unwrap_or(0);
            let first = list("prefixItems")
                .take(least)
                .find_map(|(at, one)| self.of(one, &format!("{path}.prefixItems[{at}]")));
            let others = least > schema["prefixItems"].as_array().map_or(0, Vec::len);
            return match first {
                None if others => self.of(&schema["items"], &format!("{path}.items")),
                first => first,
            };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_within_itself_has_no_end_unless_it_may_be_left_out() {
        let object = |property: Value| json!({"type": "object", "properties": {"a": property}, "required": ["a"]});
        for (schema, want) in [
            (json!({"$ref": "#"}), Some("")),
            (json!({"$ref": "#", "enum": [1]}), None),
            (json!({"$ref": "#", "const": 1}), None),
            (object(json!({"$ref": "#"})), Some(".properties.a")),
            (object(json!({"type": "array", "items": {"$ref": "#"}})), None),
            (
                object(json!({"type": "array", "minItems": 1, "items": {"$ref": "#"}})),
                Some(".properties.a.items"),
            ),
            (
                object(
                    json!({"type": "array", "minItems": 1, "prefixItems": [{}], "items": {"$ref": "#"}}),
                ),
                None,
            ),
            (object(json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]})), None),
            (
                object(json!({"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/a"}]})),
                Some(".properties.a.anyOf[0]"),
            ),
            (object(json!({"allOf": [{}, {"$ref": "#"}]})), Some(".properties.a.allOf[1]")),
            (object(json!({"$ref": "#/$defs/none"})), None),
            (json!({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}), None), // any number fits
            (json!({"type": "object", "properties": {"a": {"$ref": "#"}}}), None),
            (
                json!({"type": ["object"], "required": ["b"], "additionalProperties": {"$ref": "#"}}),
                Some(".required"),
            ),
            (
                json!({"type": ["object", "null"], "required": ["b"], "additionalProperties": {"$ref": "#"}}),
                None,
            ),
            (json!(true), None),
        ] {
            assert_eq!(endless(&schema).as_deref(), want, "{schema}");
        }
    }

    /// As deep as it looks, on a stack that is half of what a thread of the router has.
    #[test]
    fn the_deepest_look_takes_little_of_a_stack() {
        let step = |n: usize, inner: fn(Value) -> Value| {
            inner(json!({"$ref": format!("#/$defs/{}", n + 1)}))
        };
        let ways: [fn(Value) -> Value; 4] = [
            |one| one,
            |one| json!({"allOf": [one]}),
            |one| json!({"anyOf": [one]}),
            |one| json!({"type": "object", "properties": {"a": one}, "required": ["a"]}),
        ];
        for way in ways {
            let defs: serde_json::Map<_, _> =
                (0..2 * MAX_DEPTH).map(|n| (n.to_string(), step(n, way))).collect();
            let schema = json!({"$ref": "#/$defs/0", "$defs": defs});
            let thread = std::thread::Builder::new().stack_size(1 << 20);
            let found = thread.spawn(move || endless(&schema)).unwrap().join().unwrap();
            assert_eq!(found, None, "what is deeper is taken to have an end");
        }
    }

    #[test]
    fn many_ways_round_are_bounded() {
        let all: Vec<Value> = (0..40).map(|_| json!({"$ref": "#/$defs/b"})).collect();
        let defs = json!({"a": {"anyOf": all}, "b": {"allOf": all.iter().map(|_| json!({"$ref": "#/$defs/a"})).collect::<Vec<_>>()}});
        let _ = endless(&json!({"$ref": "#/$defs/a", "$defs": defs}));
    }
}
