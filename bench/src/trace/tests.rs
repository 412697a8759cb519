use std::io::Write as _;

use super::*;

const ROW: &str =
    r#"{"timestamp": 7, "input_length": 1000, "output_length": 20, "hash_ids": [0, 1]}"#;

fn lines(text: &str) -> Lines {
    Lines::of("t.jsonl".into(), text.as_bytes()).unwrap()
}

fn parse_blocks(text: &str) -> Result<Requests, String> {
    blocks::parse(&lines(text), None).map_err(|bad| bad.to_string())
}

fn requests(lengths_and_ids: &[(u32, &[u64])]) -> Requests {
    let row = |(input_tokens, ids): &(u32, &[u64])| Row {
        at_ms: 0.0,
        input_tokens: *input_tokens,
        output_tokens: 1,
        blocks: ids.to_vec(),
        session: None,
    };
    let rows = lengths_and_ids.iter().map(row).collect();
    Requests { name: "t".into(), block_tokens: 512, rows }
}

#[test]
fn a_good_row_is_read() {
    let trace = parse_blocks(&format!("{ROW}\n\n{ROW}\n")).unwrap();
    assert_eq!(trace.block_tokens, 512);
    assert_eq!(trace.rows.len(), 2);
    assert_eq!(trace.rows[0].at_ms, 0.0, "times count from the first request");
    assert_eq!((trace.rows[1].input_tokens, trace.rows[1].output_tokens), (1000, 20));
}

#[test]
fn a_bad_row_is_named_with_line_and_field() {
    for (row, why) in [
        (
            ROW.replace("7,", "\"x\","),
            "t.jsonl:2: `timestamp` is \"x\", not a number of ms from 0 on",
        ),
        (ROW.replace("7,", "-1,"), "t.jsonl:2: `timestamp` is -1, not"),
        (ROW.replace("7,", "6,"), "t.jsonl:2: the time 6 ms is before that of line 1, 7 ms"),
        (
            ROW.replace("1000", "-1000"),
            "t.jsonl:2: `input_length` is -1000, not a whole number from 1 on",
        ),
        (ROW.replace("1000", "1000.5"), "`input_length` is 1000.5, not"),
        (ROW.replace("20,", "0,"), "`output_length` is 0, not"),
        (ROW.replace("output_length", "outputs"), "t.jsonl:2: `output_length` is missing"),
        (ROW.replace("[0, 1]", "[0, \"b\"]"), "`hash_ids[1]` is \"b\", not a number from 0 on"),
        (ROW.replace("[0, 1]", "[0, -4]"), "`hash_ids[1]` is -4, not"),
        (ROW.replace("[0, 1]", "12"), "`hash_ids` must be an array"),
        (
            ROW.replace("[0, 1]", "[0, 1, 2, 3]"),
            "t.jsonl:2: `hash_ids` has 4 ids, but `input_length` 1000 makes 2 blocks of 512 tokens",
        ),
        ("{\"timestamp\": 7".into(), "t.jsonl:2: not JSON"),
        ("[1]".into(), "t.jsonl:2: not a JSON object"),
        (ROW.replace("20,", "20, \"session\": [1],"), "`session` is [1], not text or a number"),
    ] {
        let error = parse_blocks(&format!("{ROW}\n{row}\n{ROW}")).unwrap_err();
        assert!(error.contains(why), "{error}\n  should say: {why}");
    }
}

#[test]
fn the_size_of_blocks_is_found_out() {
    let row = |length: u32, block: u32| {
        let ids: Vec<u32> = (0..length.div_ceil(block)).collect();
        format!(r#"{{"timestamp":0,"input_length":{length},"output_length":1,"hash_ids":{ids:?}}}"#)
    };
    for block in [16, 32, 64, 512] {
        let text = [130, 700, 1400, 5003].map(|length| row(length, block)).join("\n");
        assert_eq!(parse_blocks(&text).unwrap().block_tokens, block);
        let given = blocks::parse(&lines(&text), Some(block / 2)).unwrap_err().to_string();
        assert!(given.contains("`hash_ids` has"), "{given}");
    }
}

#[test]
fn azure_files_old_and_new_are_read() {
    let ours = "timestamp_ms,input_length,output_length\n0,374,44\n4315,396,109\n";
    let original = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
        2023-12-31 23:59:58.5000000,374,44\n2024-01-01 00:00:02.8150000,396,109\n";
    // as in the trace of 2024
    let with_offset = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
        2024-02-28 23:59:58.500000+00:00,374,44\n2024-02-29 01:00:02.815000+01:00,396,109\n";
    let read = |text| csv::parse(&lines(text)).unwrap();
    let (ours, original) = (read(ours), read(original));
    assert_eq!(ours, original);
    assert_eq!(ours, read(with_offset));
    assert_eq!(ours.rows[1].at_ms, 4315.0);
    assert_ne!(ours.rows[0].blocks, ours.rows[1].blocks, "no two prompts share anything");
}

#[test]
fn bad_cells_are_named_with_line_and_column() {
    let head = "timestamp_ms,input_length,output_length\n0,374,44\n";
    for (text, why) in [
        (format!("{head}1,x,3"), "t.jsonl:3: `input_length` is \"x\", not a whole number"),
        (format!("{head}1,2"), "t.jsonl:3: 2 columns instead of 3"),
        (format!("{head}now,2,3"), "t.jsonl:3: `timestamp_ms` is \"now\", not a time"),
        (format!("{head}1,2,-3"), "`output_length` is \"-3\""),
        (format!("{head}5,2,3\n4,2,3"), "t.jsonl:4: the time 4 ms is before that of line 3, 5 ms"),
        ("when,what\n1,2".into(), "t.jsonl:1: neither JSON nor the columns"),
        ("timestamp_ms,input_length,output_length\n".into(), "the trace is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-01 00:00:00,1,1".into(), "`TIMESTAMP`"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-29 00:00:00,1,1".into(), "not a time"),
    ] {
        let error = csv::parse(&lines(&text)).unwrap_err().to_string();
        assert!(error.contains(why), "{error}\n  should say: {why}");
    }
}

#[test]
fn conversations_ask_once_for_each_answer() {
    let text = r#"
        {"conversation_id": "a", "role": "user", "system": "Be brief.", "content": "Hi", "tools": []}
        {"conversation_id": "b", "role": "user", "content": "Ho"}
        {"conversation_id": "a", "role": "assistant", "content": "Hello, you!!", "tool_calls": [{"id": "x"}]}
        {"conversation_id": "a", "role": "tool", "delay_seconds": 0.5, "tool_results": [{"tool_call_id": "x", "content": "1"}]}
        {"conversation_id": "a", "role": "assistant", "content": "Bye."}
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]}
    "#;
    let all = chat::parse(&lines(text)).unwrap();
    let [first, last] = &all[..] else { panic!("b has no answer: {all:?}") };
    assert_eq!(first.session, "a");
    assert_eq!(first.messages[0]["role"], "system");
    assert_eq!(first.messages[3]["tool_call_id"], "x");
    let turns: Vec<_> =
        first.turns.iter().map(|t| (t.messages, t.output_tokens, t.delay_s)).collect();
    assert_eq!(turns, [(2, 6, 0.0), (4, 1, 0.5)]);
    assert_eq!(last.turns.iter().map(|t| t.messages).collect::<Vec<_>>(), [1, 3]);
    for (bad, why) in [
        (r#"{"conversation_id": "a"}"#, "`role` is missing"),
        (r#"{"conversation_id": 3, "role": "user"}"#, "`conversation_id` must be text"),
        (r#"{"messages": "x"}"#, "`messages` must be an array"),
        (r#"{"messages": [{"content": "x"}]}"#, "`messages[0]` has no role"),
        (r#"{"conversation_id": "a", "role": "user", "delay_seconds": "1"}"#, "`delay_seconds`"),
    ] {
        let error = chat::parse(&lines(bad)).unwrap_err().to_string();
        assert!(error.contains("t.jsonl:1: ") && error.contains(why), "{error}");
    }
}

#[test]
fn files_are_told_apart_by_what_is_in_them() {
    let folder = std::env::temp_dir().join(format!("headrace-trace-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(ROW.as_bytes()).unwrap();
    let packed = folder.join("some.trace.jsonl.gz");
    std::fs::write(&packed, packer.finish().unwrap()).unwrap();
    let trace = read_requests(&packed, None).unwrap();
    assert_eq!((trace.name.as_str(), trace.rows.len()), ("some.trace", 1));
    let chat = folder.join("chat.jsonl");
    std::fs::write(&chat, r#"{"messages": [{"role": "user", "content": "x"}]}"#).unwrap();
    assert!(matches!(read(&chat, None), Ok(Trace::Chat(_))));
    assert!(read_requests(&chat, None).unwrap_err().to_string().contains("messages"));
    let empty = folder.join("empty.jsonl");
    std::fs::write(&empty, "\n").unwrap();
    assert!(read(&empty, None).unwrap_err().to_string().ends_with("the trace is empty"));
    assert!(read(&folder.join("none"), None).unwrap_err().to_string().contains("No such file"));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_slice_counts_its_times_from_its_beginning() {
    let mut trace = requests(&[(600, &[0, 1]), (600, &[0, 2]), (600, &[0, 3]), (600, &[0, 4])]);
    for (i, row) in trace.rows.iter_mut().enumerate() {
        row.at_ms = i as f64 * 1000.0;
    }
    let times = |slice: Slice| {
        let sliced = trace.clone().slice(&slice).unwrap();
        sliced.rows.iter().map(|row| row.at_ms).collect::<Vec<_>>()
    };
    assert_eq!(times(Slice { first: 1.0, until: Some(3.0), limit: None }), [0.0, 1000.0]);
    assert_eq!(times(Slice { first: 0.5, until: None, limit: Some(1) }), [500.0]);
    let nothing = Slice { first: 9.0, until: None, limit: None };
    assert!(trace.slice(&nothing).unwrap_err().to_string().contains("no requests"));
}

#[test]
fn a_smaller_trace_has_the_same_blocks() {
    // lengths as in the notes of the traces: (blocks - 1) * 16 + max(1, ceil(last / 32))
    for (length, blocks, want) in
        [(512, 1, 16), (513, 2, 17), (891, 2, 28), (1, 1, 1), (1024, 2, 32)]
    {
        let ids: Vec<u64> = (0..blocks).collect();
        let trace = requests(&[(length, &ids)]);
        let scale = Scale::new(&trace, 32, 4).unwrap();
        assert_eq!(scale.block_tokens, 16);
        assert_eq!(scale.input_tokens(&trace.rows[0]), want, "{length}");
        let prompt = scale.prompt(&trace.rows[0], 1000);
        assert_eq!(prompt.len(), want as usize);
        assert_eq!(prompt.len().div_ceil(16), blocks as usize);
        assert!(prompt.iter().all(|token| (FIRST_TOKEN..1000).contains(token)));
    }
    assert!(Scale::new(&requests(&[(1, &[0])]), 7, 1).is_err());
}

#[test]
fn equal_ids_are_equal_tokens_and_others_are_not() {
    let trace = requests(&[(1024, &[3, 4]), (1400, &[3, 4, 9]), (1024, &[3, 5])]);
    let scale = Scale::new(&trace, 32, 1).unwrap();
    let prompts: Vec<_> = trace.rows.iter().map(|row| scale.prompt(row, 32_000)).collect();
    assert_eq!(prompts[0], prompts[1][..32]);
    assert_eq!(prompts[0][..16], prompts[2][..16]);
    assert_ne!(prompts[0][16..], prompts[2][16..]);
}

#[test]
fn sessions_come_from_the_trace_or_from_the_first_blocks() {
    let trace = requests(&[(3000, &[0, 1, 2, 3, 4, 5]), (3000, &[0, 1, 2, 3, 9, 8]), (1, &[7])]);
    let keys: Vec<_> = trace.rows.iter().map(Row::session_key).collect();
    assert_eq!(keys[0], keys[1]);
    assert_ne!(keys[0], keys[2]);
    let named = Row { session: Some("s".into()), ..trace.rows[0].clone() };
    assert_eq!(named.session_key(), "s");
}
