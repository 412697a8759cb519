//! What templates may cost, and whose fault it is when they cost more.

use std::time::Duration;

use serde_json::json;

use super::*;

const ECHO: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";

fn template(source: &str) -> Result<ChatTemplate, PromptError> {
    let doc =
        json!({ "tokenizer": "{}", "context_tokens": 8, "vocab_size": 4, "bos_token": "<s>" });
    ChatTemplate::new(source, &ModelDoc::parse(doc.to_string().as_bytes()).unwrap())
}

impl ChatTemplate {
    fn render_chat(&self, chat: ChatPrompt, longest: Option<usize>) -> Result<String, RouteError> {
        self.render(&self.prepare(chat)?, longest)
    }

    fn render_within(&self, chat: ChatPrompt, limits: Limits) -> Result<String, RouteError> {
        let prepared = self.prepare(chat)?;
        let text = self.attempt(&prepared, limits);
        text.map_err(|(error, budget)| self.refuse(&error, &budget, &limits))?.closed(&prepared)
    }
}

fn chat(content: &Json) -> ChatPrompt {
    let messages = vec![json!({ "role": "user", "content": content })];
    ChatPrompt { messages, add_generation_prompt: true, ..ChatPrompt::default() }
}

fn refused(result: Result<String, RouteError>) -> String {
    let Err(RouteError::BadRequest { param: Some(param), message }) = result else {
        panic!("{result:?}");
    };
    assert_eq!(param, "messages");
    message
}

#[test]
fn a_chat_longer_than_the_model_can_read_is_refused() {
    let template = template(ECHO).unwrap();
    let text = |len: usize| chat(&"x".repeat(len).into());
    assert_eq!(template.render_chat(text(100), Some(100)).unwrap().len(), 100);
    let error = template.render_chat(text(101), Some(100)).unwrap_err();
    let expected = RouteError::ContextLengthAtLeast { prompt: 9, answer: 0, limit: 8 };
    assert_eq!(error.to_string(), expected.to_string());
    let whole = template.render_chat(text(1_000_000), None);
    assert_eq!(whole.unwrap().len(), 1_000_000);
}

#[test]
fn messages_that_take_the_template_past_a_bound_are_refused_with_its_name() {
    let doubled = template(
        "{% set ns = namespace(s='ab') %}{% for i in messages[0].content %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    );
    let message = refused(doubled.unwrap().render_chat(chat(&"x".repeat(100).into()), None));
    assert!(message.contains("more than 32 MiB of memory"), "{message}");
    let limits = Limits { work: 100_000, ..Limits::of(0) };
    let echo = template(ECHO).unwrap();
    let message = refused(echo.render_within(chat(&"x".repeat(1 << 20).into()), limits));
    assert!(message.contains("takes too long"), "{message}");
}

#[test]
fn a_template_that_never_ends_is_refused_when_it_is_read() {
    for (source, says) in [
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "memory",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (
            "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% endfor %}",
            "nested",
        ),
        ("{% set x = 'x' * 999 %}{% for i in range(99999) %}{{ x }}{% endfor %}", "memory"),
        ("{% include 'x' %}", "`include`"),
        ("{% if %}", "line 1"),
    ] {
        let Err(PromptError::Template(why)) = template(source) else { panic!("{source}") };
        assert!(why.contains(says), "{source}: {why}");
    }
    // What it raises, or misses, is between it and the messages.
    for source in ["{{ raise_exception('no') }}", "{{ messages[7].content.x }}", "{{ nothing() }}"]
    {
        assert!(template(source).is_ok(), "{source}");
    }
}

#[test]
fn what_is_raised_does_not_bring_back_the_whole_request() {
    let template = template("{{ raise_exception(messages[0].content) }}").unwrap();
    let message = refused(template.render_chat(chat(&"é".repeat(1 << 20).into()), None));
    assert!(message.ends_with("é...") && message.len() < 5_000, "{}", message.len());
}

#[test]
fn memory_grows_with_the_chat() {
    let source = "{% for i in range(3) %}{{ messages[0].content[:-1] ~ i }}{% endfor %}";
    let template = template(source).unwrap();
    let render = |bytes: usize| template.render_chat(chat(&"x".repeat(bytes).into()), None);
    for bytes in [1 << 10, 1 << 20, 6 << 20] {
        assert_eq!(render(bytes).unwrap().len(), 3 * bytes);
    }
    let limits = |bytes: usize| Limits::of(bytes).memory;
    assert_eq!(limits(0), 32 << 20);
    assert_eq!(limits(1 << 20), 44 << 20);
    assert_eq!([limits(19 << 20), limits(usize::MAX)], [256 << 20; 2]);
}

#[test]
fn short_messages_have_room_for_what_templates_make_of_them() {
    let joins = "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + '\n\n' + m.content %}\
                 {% endfor %}{{ ns.s }}{% for m in messages %}{{ [m] | tojson }}{% endfor %}";
    let template = template(joins).unwrap();
    for content in ["x", "a word or two", &"x".repeat(100)] {
        let message = json!({ "role": "user", "content": content });
        let chat = ChatPrompt { messages: vec![message; 100_000], ..ChatPrompt::default() };
        let text = template.render_chat(chat, None);
        assert!(text.is_ok(), "{content}: {:?}", text.map(|text| text.len()));
    }
}

#[test]
fn a_machine_too_busy_to_render_in_time_says_when_to_try_again() {
    let limits = Limits { time: Duration::ZERO, ..Limits::of(0) };
    let result = template(ECHO).unwrap().render_within(chat(&"x".repeat(8 << 20).into()), limits);
    assert!(matches!(result, Err(RouteError::Overloaded { .. })), "{result:?}");
}

#[test]
fn variables_of_the_client_are_charged_and_cannot_be_deep() {
    let template = template("{{ extra | length }}").unwrap();
    let render = |extra: Json| {
        let mut prompt = chat(&"hi".into());
        prompt.template_kwargs.insert("extra".to_owned(), extra);
        template.render_chat(prompt, None)
    };
    assert_eq!(render(json!([1, "two", {}])).unwrap(), "3");
    assert!(refused(render(vec![json!({}); 3_000_000].into())).contains("256 MiB of memory"));
    let mut deep = json!(0);
    for _ in 0..200 {
        deep = json!({ "": deep });
    }
    assert!(refused(render(deep)).contains("nested too deeply"));
}

#[test]
fn what_takes_long_is_left_to_those_who_have_time_and_is_the_same_then() {
    let template = template(
        "{% for a in messages[0].content %}{% for b in messages[0].content %}{% set x = a ~ b %}{% endfor %}\
         {% endfor %}{{ messages[0].content }}",
    )
    .unwrap();
    let open = |text: &str| ChatPrompt {
        continue_final_message: true,
        add_generation_prompt: false,
        ..chat(&text.into())
    };
    let short = template.prepare(open("few")).unwrap();
    assert_eq!(template.render_quickly(&short, None, false).unwrap().as_deref(), Some("few"));
    let text = "x".repeat(300); // enough for that, and far from the seconds that a busy machine may take
    let long = template.prepare(open(&text)).unwrap();
    assert_eq!(template.render_quickly(&long, None, false).unwrap(), None);
    assert_eq!(template.render(&long, None).unwrap(), text);
    let message = template.render_quickly(&long, Some(10), false);
    assert!(message.unwrap().is_none(), "it did not come to its output");
}

/// A thread that serves sockets has the stack of this test, an eighth of those of the tokeniser.
#[test]
fn a_rendering_beside_sockets_stops_early_at_any_bound_and_is_the_same_elsewhere() {
    let deep = "{% macro down(n) %}{% if n > 0 %}{{ down(n - 1) }}{% else %}end{% endif %}{% endmacro %}\
        {{ down(messages[0].content | length) }}";
    let wide = "{% for a in range(20000) %}{% set x = a %}{% endfor %}end";
    for (source, text) in [(deep, "xxx".repeat(10)), (wide, String::new())] {
        let template = template(source).unwrap();
        let prepared = template.prepare(chat(&text.into())).unwrap();
        assert_eq!(template.render_quickly(&prepared, None, true).unwrap(), None);
        let elsewhere = template.render_quickly(&prepared, None, false).unwrap();
        assert_eq!(elsewhere.as_deref(), Some("end"));
    }
    let short = template("{{ messages[0].content }}").unwrap();
    let prepared = short.prepare(chat(&"short".into())).unwrap();
    assert_eq!(short.render_quickly(&prepared, None, true).unwrap().as_deref(), Some("short"));
}
