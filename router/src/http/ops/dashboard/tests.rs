//! The page's files, and what may stand behind the `?`.

use super::*;

const FILES: [&str; 8] = [
    "page.css",
    "page.js",
    "chart.js",
    "chat.js",
    "dom.js",
    "events.js",
    "fleet.js",
    "placements.js",
];

fn text(name: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/http/ops/dashboard");
    std::fs::read_to_string(format!("{path}/{name}")).unwrap()
}

#[test]
fn the_page_is_small_and_asks_nobody_else() {
    let mut bytes = 0;
    for name in ["page.html"].iter().chain(&FILES) {
        let text = text(name);
        bytes += text.len();
        for foreign in ["http:", "https:", "//cdn", "@import", "url(", "WebSocket", "import("] {
            assert!(!text.contains(foreign), "{name}: {foreign}");
        }
        // names and answers are data of strangers
        for unsafe_way in
            ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function("]
        {
            assert!(!text.contains(unsafe_way), "{name}: {unsafe_way}");
        }
    }
    assert!(bytes <= 64 << 10, "{bytes}");
    let page = text("page.html");
    for inline in ["<style", "style=", "onclick", "onload", "javascript:"] {
        assert!(!page.contains(inline), "the policy forbids {inline}");
    }
    assert!(!page.contains("<script>"), "the policy forbids a script without a file");
}

#[tokio::test]
async fn its_files_are_there_and_no_others() {
    for name in FILES {
        let answer = file(Path(name.to_owned())).await.unwrap();
        let kind = if name.ends_with("css") { "text/css" } else { "text/javascript" };
        let header = answer.headers()[header::CONTENT_TYPE].to_str().unwrap();
        assert!(header.starts_with(kind), "{name}: {header}");
    }
    for name in ["", "page.html", "../page.js", "page.js/", "events", "document.rs"] {
        let Err(reject) = file(Path(name.to_owned())).await else { panic!("{name}") };
        assert_eq!(reject.status(), 404, "{name}");
    }
    // every module that another one loads is one of them
    for name in FILES.iter().filter(|name| name.ends_with("js")) {
        for import in text(name).split(" from \"./").skip(1) {
            let module = import.split('"').next().unwrap();
            assert!(FILES.contains(&module), "{name} loads {module}");
        }
    }
}

#[test]
fn one_event_or_many_and_nothing_else_is_asked_for() {
    for (query, once) in [
        (None, false),
        (Some(""), false),
        (Some("once"), true),
        (Some("once=true"), true),
        (Some("once=1"), true),
        (Some("once=false"), false),
    ] {
        assert_eq!(wants_one(query).unwrap(), once, "{query:?}");
    }
    for query in ["twice", "once=2", "once=1&x=y", "x", "&", "once=true&once=true"] {
        assert!(wants_one(Some(query)).is_err(), "{query}");
    }
}
