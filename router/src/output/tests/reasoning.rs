//! Calls after reasoning, and what stands right after a marker.

use super::calls::{Got, called, got, said, tools};
use super::*;
use crate::prompt::ToolParser;

#[test]
fn reasoning_comes_before_calls() {
    let format = |forced| {
        let tools = Tools { forced, ..tools(ToolParser::Hermes) };
        let mut format = Format::new(Some(ReasoningParser::Think), Some(tools)).unwrap();
        format.after_prompt("<think>\n");
        format
    };
    let call = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
    let text = format!("I will {call}.\n</think>\n\n{call}");
    let inner = format!("I will {call}.");
    assert_eq!(got(&format(false), &text), [Got::Thought(inner), called("f", "{}")]);
    // the grammar of a forced call needs no end of the reasoning
    assert_eq!(got(&format(true), call), [called("f", "{}")]);
    assert_eq!(got(&format(true), &format!("</think>\n\n{call}")), [called("f", "{}")]);
}

/// Also calls that begin without a marker begin after reasoning; forced ones in its place, too.
#[test]
fn calls_without_a_marker_come_after_reasoning() {
    for (parser, call) in [
        (ToolParser::Llama, r#"{"name": "f"}"#),
        (ToolParser::Pythonic, "[f()]"),
        (ToolParser::Pythonic, "<|python_start|>[f()]<|python_end|>"),
    ] {
        for forced in [false, true] {
            let tools = Tools { forced, ..tools(parser) };
            let mut format = Format::new(Some(ReasoningParser::Think), Some(tools)).unwrap();
            let thought = || Got::Thought("I [f]".to_owned());
            let text = format!("<think>I [f]</think>\n\n{call}");
            assert_eq!(got(&format, &text), [thought(), called("f", "{}")]);
            let text = format!("<think>I [f]</think> Hm {call}");
            assert_eq!(got(&format, &text), [thought(), said(&format!("Hm {call}"))]);
            format.after_prompt("<think>\n");
            let text = format!("I [f]</think>\n\n{call}");
            assert_eq!(got(&format, &text), [thought(), called("f", "{}")]);
            assert_eq!(got(&format, &format!("</think>{call}")), [called("f", "{}")]);
        }
    }
    let tools = Tools { forced: true, ..tools(ToolParser::Llama) };
    let mut format = Format::new(Some(ReasoningParser::Think), Some(tools)).unwrap();
    format.after_prompt("<think>");
    assert_eq!(got(&format, r#"{"name": "f"}"#), [called("f", "{}")]);
}

#[test]
fn what_opens_no_call_is_text_also_right_after_a_marker() {
    let tools = tools(ToolParser::QwenCoder);
    let format = Format::new(Some(ReasoningParser::Think), Some(tools)).unwrap();
    for rest in ["<tool_call>", "<tool_call>\n x", "<tool_call></tool_call> x"] {
        let text = format!("<think>a</think>\n{rest}");
        assert_eq!(got(&format, &text), [Got::Thought("a".to_owned()), said(rest)]);
        let text = format!("<function=f></function>\n{rest}");
        assert_eq!(got(&format, &text), [called("f", "{}"), said(rest)]);
    }
}
