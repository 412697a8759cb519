//! Names of the ways in which models mark their reasoning and their tool calls. Chat templates show them; flags name them.

use super::{ConfigError, RouterArgs, flag};

/// How a model marks the parts of its answers, where the chat template is not to be asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParserConfig {
    /// For tool calls.
    pub tools: Option<ToolParser>,
    /// For reasoning; `Some(None)`: there is none.
    pub reasoning: Option<Option<ReasoningParser>>,
}

/// A way to write tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolParser {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
    Hermes,
    /// `<tool_call><function=..><parameter=..>..</parameter></function></tool_call>`.
    QwenCoder,
    /// `{"name": .., "parameters": {..}}` in the place of an answer, also after `<|python_tag|>`.
    Llama,
    /// `[name(argument=..)]` in the place of an answer.
    Pythonic,
    /// `[TOOL_CALLS]` before a list of objects, or before `name[ARGS]{..}`.
    Mistral,
    /// DeepSeek-V3 and R1: arguments in a block of code.
    DeepseekV3,
    /// DeepSeek-V3.1: arguments as they are.
    DeepseekV31,
    /// `<tool_call>name<arg_key>..</arg_key><arg_value>..</arg_value></tool_call>`.
    Glm,
    /// `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`.
    Kimi,
    /// Messages to `functions.name` in the channel `commentary`.
    Harmony,
    /// `<|tool_call>call:name{argument:..}<tool_call|>`.
    Gemma,
}

/// A way to mark reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReasoningParser {
    /// `<think>..</think>`.
    Think,
    /// `[THINK]..[/THINK]`.
    Mistral,
    /// The channel `analysis`.
    Harmony,
    /// `<|channel>thought..<channel|>`.
    Gemma,
}

impl ToolParser {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Hermes,
        Self::QwenCoder,
        Self::Llama,
        Self::Pythonic,
        Self::Mistral,
        Self::DeepseekV3,
        Self::DeepseekV31,
        Self::Glm,
        Self::Kimi,
        Self::Harmony,
        Self::Gemma,
    ];

    /// Its name in flags and in `/v1/models`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::QwenCoder => "qwen3-coder",
            Self::Llama => "llama3-json",
            Self::Pythonic => "pythonic",
            Self::Mistral => "mistral",
            Self::DeepseekV3 => "deepseek-v3",
            Self::DeepseekV31 => "deepseek-v3.1",
            Self::Glm => "glm-4.5",
            Self::Kimi => "kimi-k2",
            Self::Harmony => "harmony",
            Self::Gemma => "gemma",
        }
    }
}

impl ReasoningParser {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Think, Self::Mistral, Self::Harmony, Self::Gemma];

    /// Its name in flags and in `/v1/models`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Think => "think",
            Self::Mistral => "mistral",
            Self::Harmony => "harmony",
            Self::Gemma => "gemma",
        }
    }
}

/// What the flag says where there is no reasoning to be found.
pub(super) const NO_PARSER: &str = "none";

impl ParserConfig {
    pub(super) fn check(args: &RouterArgs) -> Result<Self, ConfigError> {
        let unknown = |name: &'static str, typed: &str| {
            flag(name, format!("{typed:?} is no parser"), "the help of the flag lists them")
        };
        let tools = args.tool_parser.as_deref().map(|typed| {
            let known = ToolParser::ALL.into_iter().find(|parser| parser.as_str() == typed);
            known.ok_or_else(|| unknown("tool-parser", typed))
        });
        let reasoning = args.reasoning_parser.as_deref().map(|typed| {
            if typed == NO_PARSER {
                return Ok(None);
            }
            let known = ReasoningParser::ALL.into_iter().find(|parser| parser.as_str() == typed);
            known.map(Some).ok_or_else(|| unknown("reasoning-parser", typed))
        });
        Ok(Self { tools: tools.transpose()?, reasoning: reasoning.transpose()? })
    }
}
