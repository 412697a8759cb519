//! What a chat template shows of how its model answers: how it marks reasoning and tool calls, and what can be asked of it.

use crate::config::{ReasoningParser, ToolParser};

/// What the text of a chat template shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Conventions {
    /// The template shows tools to the model.
    pub knows_tools: bool,
    /// How it writes calls, where that is a way known here.
    pub tools: Option<ToolParser>,
    /// How it writes calls of Mistral's form.
    pub mistral: MistralCalls,
    /// How it marks reasoning, where it does.
    pub reasoning: Option<ReasoningParser>,
    /// It reads `reasoning_effort`.
    pub knows_effort: bool,
    /// The variable that switches reasoning on and off.
    pub switch: Option<&'static str>,
}

/// How calls stand behind `[TOOL_CALLS]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MistralCalls {
    /// `[{"name": .., "arguments": {..}}]`.
    #[default]
    Listed,
    /// `name[ARGS]{..}`.
    Named,
    /// `name[CALL_ID]id[ARGS]{..}`.
    NamedWithId,
}

/// The first line all of whose texts stand in a template names its way to write calls. What is more special comes first.
const CALLS: [(&[&str], ToolParser); 13] = [
    (&["<|channel|>", "<|constrain|>"], ToolParser::Harmony),
    (&["<|tool_call_begin|>"], ToolParser::Kimi),
    (&["<｜tool▁call▁begin｜>", "```json"], ToolParser::DeepseekV3),
    (&["<｜tool▁call▁begin｜>"], ToolParser::DeepseekV31),
    (&["<arg_key>"], ToolParser::Glm),
    (&["<function=", "<parameter="], ToolParser::QwenCoder),
    (&["<|tool_call>"], ToolParser::Gemma),
    (&["[TOOL_CALLS]"], ToolParser::Mistral),
    (&["<tool_call>"], ToolParser::Hermes),
    (&["<|python_start|>"], ToolParser::Pythonic),
    (&["<|start_header_id|>", "\"parameters\""], ToolParser::Llama),
    (&["<|python_tag|>"], ToolParser::Llama),
    (&["tools", "pythonic"], ToolParser::Pythonic),
];

/// The same for reasoning.
const REASONING: [(&str, ReasoningParser); 4] = [
    ("<|channel|>analysis", ReasoningParser::Harmony),
    ("<|channel>thought", ReasoningParser::Gemma),
    ("[THINK]", ReasoningParser::Mistral),
    ("</think>", ReasoningParser::Think),
];

impl Conventions {
    /// How calls are written. A template that knows no tools gets them told in a message, which asks for Hermes' way.
    #[must_use]
    pub fn call_parser(&self) -> Option<ToolParser> {
        if self.knows_tools { self.tools } else { Some(ToolParser::Hermes) }
    }

    /// Of the source of a template.
    #[must_use]
    pub fn of(template: &str) -> Self {
        let calls =
            CALLS.iter().find(|(texts, _)| texts.iter().all(|text| template.contains(text)));
        let reasoning = REASONING.iter().find(|(text, _)| template.contains(text));
        let switches = ["enable_thinking", "thinking"];
        let switch = switches.into_iter().find(|name| names(template, name));
        let knows_tools = names(template, "tools");
        Self {
            knows_tools,
            mistral: match (template.contains("[ARGS]"), template.contains("[CALL_ID]")) {
                (true, true) => MistralCalls::NamedWithId,
                (true, false) => MistralCalls::Named,
                (false, _) => MistralCalls::Listed,
            },
            tools: calls.filter(|_| knows_tools).map(|(_, parser)| *parser),
            reasoning: reasoning.map(|(_, parser)| *parser),
            knows_effort: names(template, "reasoning_effort"),
            switch,
        }
    }
}

/// The template names a variable: the word stands in its code, and not as a field of something or as a text.
fn names(template: &str, variable: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '\'' | '"');
    template.match_indices(variable).any(|(at, _)| {
        let (before, after) = (&template[..at], &template[at + variable.len()..]);
        let in_code =
            before.rfind(['{', '}']).is_some_and(|brace| before[brace..].starts_with('{'));
        in_code && !before.ends_with(|c: char| word(c) || c == '.') && !after.starts_with(word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_a_word_of_the_code() {
        for (template, known) in [
            ("{% if tools %}", true),
            ("{%- for tool in tools.items() %}", true),
            ("{{ tools }}", true),
            ("tools {{ messages }} tools", false),
            ("{% if message.tools %}{{ custom_tools }}{{ 'tools' }}", false),
        ] {
            assert_eq!(names(template, "tools"), known, "{template}");
        }
    }

    #[test]
    fn templates_are_recognised_by_what_they_write() {
        let of =
            |written: &str| Conventions::of(&format!("{{% if tools %}}{written}{{% endif %}}"));
        for (written, tools, reasoning) in [
            ("<tool_call>", Some(ToolParser::Hermes), None),
            ("</think> <tool_call>", Some(ToolParser::Hermes), Some(ReasoningParser::Think)),
            ("<tool_call> <function=f> <parameter=p>", Some(ToolParser::QwenCoder), None),
            ("<tool_call> <arg_key>", Some(ToolParser::Glm), None),
            ("[TOOL_CALLS] [THINK]", Some(ToolParser::Mistral), Some(ReasoningParser::Mistral)),
            ("<｜tool▁call▁begin｜> ```json", Some(ToolParser::DeepseekV3), None),
            ("<｜tool▁call▁begin｜>", Some(ToolParser::DeepseekV31), None),
            ("<|tool_call_begin|>", Some(ToolParser::Kimi), None),
            ("<|start_header_id|> \"parameters\": ", Some(ToolParser::Llama), None),
            ("<|python_start|>", Some(ToolParser::Pythonic), None),
            (
                "<|channel|>analysis <|channel|> <|constrain|>",
                Some(ToolParser::Harmony),
                Some(ReasoningParser::Harmony),
            ),
            ("<|tool_call>", Some(ToolParser::Gemma), None),
            ("nothing", None, None),
        ] {
            let got = of(written);
            assert_eq!((got.tools, got.reasoning), (tools, reasoning), "{written}");
            assert!(got.knows_tools);
        }
        for (written, calls) in [
            ("[TOOL_CALLS] [{", MistralCalls::Listed),
            ("[TOOL_CALLS]' + name + '[ARGS]", MistralCalls::Named),
            ("[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]", MistralCalls::NamedWithId),
        ] {
            assert_eq!(of(written).mistral, calls, "{written}");
        }
        assert_eq!(Conventions::of("<tool_call> {{ messages }}"), Conventions::default());
        let effort = Conventions::of("{{ reasoning_effort }}{% if enable_thinking %}");
        assert!(effort.knows_effort && effort.switch == Some("enable_thinking"));
    }
}
