//! Scripts alone: what their lines say, who gets which answer, and in which portions.

use super::*;

async fn script(text: &str) -> Result<Script, String> {
    let file = tempfile(text);
    let read = Script::read(&file, &Model::built_in()).await;
    std::fs::remove_file(&file).unwrap();
    // the path is another one each time
    read.map_err(|error| format!("{error:#}").replace(&file.display().to_string(), "FILE"))
}

fn tempfile(text: &str) -> std::path::PathBuf {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("script-{}-{number}", std::process::id()));
    std::fs::write(&path, text).unwrap();
    path
}

/// How many tokens each step gives, from the first one on.
fn portions(answer: &ScriptedAnswer, seed: u64) -> Vec<u32> {
    let (mut given, mut waited, mut steps) = (0, 0, Vec::new());
    while given < answer.len() {
        let portion = answer.portion(seed, given, waited);
        assert!(portion > 0 || given == 0, "only the first token is waited for");
        (given, waited) = (given + portion, waited + u32::from(portion == 0));
        steps.push(portion);
    }
    steps
}

async fn only(line: &str) -> (Script, ScriptedAnswer) {
    let script = script(line).await.unwrap();
    let answer = script.answer(&[], &[], &[]).unwrap();
    (script, answer)
}

#[tokio::test]
async fn texts_become_tokens_and_come_back() {
    let text = "<think>\nA wheel, 7 m.</think>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"\u{e9}\u{1f642}\"}}\n</tool_call>";
    for pieces in ["tokens", "characters"] {
        let line = serde_json::json!({"text": text, "pieces": pieces}).to_string();
        let (script, answer) = only(&line).await;
        let (end, ids) = answer.ids.split_last().unwrap();
        assert_eq!(script.engine.doc().eos_token_ids, [*end]);
        assert_eq!(script.engine.decode(ids, false), text);
        let named = script.engine.token_id("<tool_call>").unwrap();
        assert_eq!(ids.iter().filter(|id| **id == named).count(), 1, "{pieces}: a token by name");
        let longest = ids.iter().filter(|id| **id < 4096).map(|id| script.engine.token_text(*id).0);
        let longest = longest.map(|text| text.chars().count()).max().unwrap();
        assert_eq!(longest > 1, pieces == "tokens", "{pieces}: {longest} characters");
    }
}

#[tokio::test]
async fn steps_give_what_the_line_says() {
    let line = |more: &str| format!("{{\"text\": \"a b c d e\", \"finish\": \"length\"{more}}}");
    for (more, want) in [
        ("", vec![1, 1, 1, 1, 1]),
        (", \"tokens_per_step\": 2", vec![2, 2, 1]),
        (", \"tokens_per_step\": 3, \"delay_steps\": 2", vec![0, 0, 3, 2]),
        (", \"tokens_per_step\": \"all\"", vec![5]),
    ] {
        let (_, answer) = only(&line(more)).await;
        assert_eq!(portions(&answer, 9), want, "{more}");
    }
    let (_, answer) = only(&line(", \"tokens_per_step\": \"every-cut\"")).await;
    let cuts: Vec<_> = (0..5).map(|seed| portions(&answer, seed)).collect();
    assert_eq!(cuts, [vec![1, 4], vec![2, 3], vec![3, 2], vec![4, 1], vec![1, 4]]);
    let (_, answer) =
        only("{\"text\": \"a\", \"finish\": \"length\", \"tokens_per_step\": \"every-cut\"}").await;
    assert_eq!(portions(&answer, 3), [1], "one token cannot be cut");
}

#[tokio::test]
async fn a_condition_comes_before_turns_and_a_resumed_answer_goes_on() {
    let script = script(
        "# answers\n{\"text\": \"one\"}\n\n{\"text\": \"met\", \"when\": \"water\"}\n{\"text\": \"two\"}\n",
    );
    let script = script.await.unwrap();
    assert_eq!(script.answers(), 3);
    let ids = |text: &'static str| script.engine.encode_text(text.into(), false);
    let (dry, wet) = (ids("stone").await.unwrap(), ids("much water").await.unwrap());
    let mut given = Vec::new();
    for prompt in [&dry, &wet, &dry, &dry, &wet] {
        let answer = script.answer(prompt, &[], &[]).unwrap();
        given.push(script.engine.decode(&answer.ids, true));
    }
    assert_eq!(given, ["one", "met", "two", "one", "met"]);
    let begun = ids("two").await.unwrap();
    let resumed = script.answer(&dry, &begun, &[]).unwrap();
    assert!(resumed.ids.starts_with(&begun));
    let lacks = script.answer(&dry, &[7, 7], &[]).unwrap_err();
    assert!(lacks.contains("begins with the 2 tokens"), "{lacks}");
}

#[tokio::test]
async fn a_stop_token_ends_an_answer_and_a_prompt_without_one_is_told() {
    let (script, _) = only("{\"text\": \"a<|eom_id|>b\", \"finish\": \"length\"}").await;
    let stop = script.engine.token_id("<|eom_id|>").unwrap();
    let answer = script.answer(&[], &[], &[stop]).unwrap();
    assert_eq!((answer.ids.last(), answer.finish), (Some(&stop), Finish::Stop));
    let script = self::script("{\"text\": \"a\", \"when\": \"water\"}").await.unwrap();
    assert!(script.answer(&[], &[], &[]).unwrap_err().contains("no answer of the script"));
}

#[tokio::test]
async fn what_is_wrong_is_named_with_its_line() {
    let long = format!("{{\"text\": \"{}\"}}", "x".repeat(300_000));
    for (text, says) in [
        ("", "FILE: no line has an answer"),
        ("{\"text\": \"a\"}\n{\"text\": ", "FILE:2: EOF"),
        ("[]", "FILE:1: an answer is a JSON object"),
        ("{}", "FILE:1: `text` is required"),
        ("{\"text\": 3}", "FILE:1: `text` is not a string"),
        (&long, "FILE:1: `text` is 300000 bytes, the limit is 262144"),
        ("{\"text\": \"\", \"finish\": \"length\"}", "FILE:1: `text` is empty"),
        ("{\"text\": \"a\", \"when\": \"\"}", "FILE:1: `when` is empty"),
        (
            "{\"text\": \"a\", \"finish\": \"end\"}",
            "`finish` is \"stop\" or \"length\", not \"end\"",
        ),
        ("{\"text\": \"a\", \"pieces\": 1}", "`pieces` is \"tokens\" or \"characters\", not 1"),
        ("{\"text\": \"a\", \"delay_steps\": -1}", "from 0 to 10000, not -1"),
        ("{\"text\": \"a\", \"tokens_per_step\": 0}", "from 1 to 65536, not 0"),
        (
            "{\"text\": \"a\", \"tokens_per_step\": \"two\"}",
            "\"all\" or \"every-cut\", not \"two\"",
        ),
        ("\n{\"text\": \"a\", \"txt\": 1}", "FILE:2: `line` has an unknown field `txt`"),
    ] {
        let error = script(text).await.err().unwrap_or_else(|| panic!("{text}"));
        assert!(error.contains(says), "{error}");
    }
}

#[tokio::test]
async fn a_text_that_the_tokenizer_loses_is_refused_by_name() {
    // a tokenizer without an entry for `q` and without bytes
    let tokenizer = serde_json::json!({
        "version": "1.0", "added_tokens": [], "normalizer": {"type": "Lowercase"}, "pre_tokenizer": null,
        "post_processor": null, "decoder": {"type": "Fuse"}, "truncation": null, "padding": null,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "u", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"a": 0, "b": 1, "u": 2}, "merges": [],
        },
    });
    let document = serde_json::json!({
        "tokenizer": tokenizer.to_string(), "context_tokens": 100, "vocab_size": 3,
    });
    let model = Model { document: document.to_string().into_bytes(), ..Model::built_in() };
    let file = tempfile("{\"text\": \"ab\", \"finish\": \"length\"}\n{\"text\": \"abqa\"}");
    let error = Script::read(&file, &model).await.unwrap_err().to_string();
    std::fs::remove_file(&file).unwrap();
    assert!(error.contains(":2: `text` does not come back"), "{error}");
    assert!(error.contains("character 3 on it gives \"ua\" for \"qa\""), "{error}");
}
