//! One way to call each crate: as its own project's server does, piece by piece, and what comes of it as text.

use dynamo_parsers::reasoning::{ReasoningParser as _, ReasoningParserType};
use dynamo_parsers::tool_calling::ToolDefinition;
use dynamo_parsers::tool_calling::jail::{Annotated, JailedStream};
use dynamo_parsers_v2::{
    Tool, UnifiedParserEvent, UnifiedParserInit, UnifiedParserOutput,
    create_unified_parser_for_family,
};
use dynamo_protocols::types::{
    ChatChoiceStream, ChatCompletionMessageContent, ChatCompletionStreamResponseDelta,
    CreateChatCompletionStreamResponse, FinishReason,
};
use futures::StreamExt;
use futures::executor::block_on;
use headrace_router::output::{ArgumentKind, Format, Part, Tools};
use headrace_router::prompt::{ReasoningParser, ToolParser};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Crate {
    #[serde(rename = "headrace-router")]
    Headrace,
    #[serde(rename = "dynamo-parsers")]
    Dynamo,
    #[serde(rename = "dynamo-parsers-v2")]
    DynamoV2,
    #[serde(rename = "tool-parser")]
    Gateway,
}

/// What a crate calls the parsers of a form.
#[derive(Deserialize)]
pub struct Names {
    pub calls: String,
    pub reasoning: Option<String>,
}

/// What the pieces were read as.
#[derive(Default)]
pub struct Got {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<(String, String)>,
}

impl Got {
    fn call(&mut self, index: usize, name: Option<&str>, arguments: &str) {
        while self.calls.len() <= index {
            self.calls.push(Default::default());
        }
        self.calls[index].0.push_str(name.unwrap_or_default());
        self.calls[index].1.push_str(arguments);
    }

    pub fn shown(&self) -> Value {
        json!({"content": self.content, "reasoning": self.reasoning, "calls": self.calls})
    }
}

impl Crate {
    /// What is to be done once may be done now; the rest is timed. It panics where the crate fails.
    pub fn prepare(
        self,
        names: &Names,
        reasons: bool,
        tools: &Value,
        pieces: &[&str],
    ) -> Box<dyn FnOnce() -> Got> {
        let pieces: Vec<String> = pieces.iter().map(|piece| (*piece).to_owned()).collect();
        let reasoning = names.reasoning.clone().filter(|_| reasons);
        let calls = names.calls.clone();
        match self {
            Self::Headrace => headrace(&calls, reasoning.as_deref(), tools, pieces),
            Self::Dynamo => dynamo(calls, reasoning, tools, pieces),
            Self::DynamoV2 => dynamo_v2(&calls, tools, pieces),
            Self::Gateway => gateway(&calls, reasoning.as_deref(), tools, pieces),
        }
    }
}

fn functions(tools: &Value) -> impl Iterator<Item = &Value> {
    tools.as_array().into_iter().flatten().map(|tool| &tool["function"])
}

fn headrace(
    calls: &str,
    reasoning: Option<&str>,
    tools: &Value,
    pieces: Vec<String>,
) -> Box<dyn FnOnce() -> Got> {
    let parser = ToolParser::ALL.into_iter().find(|parser| parser.as_str() == calls);
    let parser = parser.expect("it is one of ours");
    // messages of harmony are told apart by one reader
    let reasoning = reasoning.or((parser == ToolParser::Harmony).then_some("harmony"));
    let thoughts = [
        ReasoningParser::Think,
        ReasoningParser::Mistral,
        ReasoningParser::Gemma,
        ReasoningParser::Harmony,
    ];
    let reasoning =
        reasoning.map(|name| thoughts.into_iter().find(|one| one.as_str() == name).expect("ours"));
    let kinds = |function: &Value| {
        let properties = function["parameters"]["properties"].as_object().into_iter().flatten();
        let typed = properties.filter(|(_, schema)| schema["type"] != "string");
        typed.map(|(name, _)| (name.clone(), ArgumentKind::Json)).collect()
    };
    let functions =
        functions(tools).map(|one| (one["name"].as_str().expect("a name").to_owned(), kinds(one)));
    let tools = Tools { parser, functions: functions.collect(), parallel: true, forced: false };
    let format = Format::new(reasoning, Some(tools)).expect("it has parts");
    Box::new(move || {
        let (mut got, mut parts, mut reader) = (Got::default(), Vec::new(), format.reader());
        for piece in &pieces {
            reader.push(piece, &mut parts);
            parts.drain(..).for_each(|part| add(&mut got, part));
        }
        reader.finish(&mut parts);
        parts.drain(..).for_each(|part| add(&mut got, part));
        got
    })
}

fn add(got: &mut Got, part: Part) {
    match part {
        Part::Content(text) => got.content.push_str(&text),
        Part::Reasoning(text) => got.reasoning.push_str(&text),
        Part::CallBegins { name, .. } => got.calls.push((name, String::new())),
        Part::CallArguments { text, .. } => {
            got.calls.last_mut().expect("it began").1.push_str(&text)
        }
    }
}

fn gateway(
    calls: &str,
    reasoning: Option<&str>,
    tools: &Value,
    pieces: Vec<String>,
) -> Box<dyn FnOnce() -> Got> {
    let tools = serde_json::from_value::<Vec<_>>(tools.clone()).expect("tools of OpenAI's API");
    let mut parser = tool_parser::ParserFactory::new().registry().create_parser(calls).expect("it");
    let mut thoughts = reasoning.map(|name| {
        reasoning_parser::ParserFactory::new().registry().create_parser(name).expect("it")
    });
    Box::new(move || {
        let mut got = Got::default();
        block_on(async {
            let mut texts: Vec<String> = Vec::new();
            for piece in pieces {
                let text = match &mut thoughts {
                    Some(thoughts) => {
                        let read = thoughts.parse_reasoning_streaming_incremental(&piece);
                        let read = read.expect("it reads");
                        got.reasoning.push_str(&read.reasoning_text);
                        read.normal_text
                    }
                    None => piece,
                };
                if !text.is_empty() {
                    let read = parser.parse_incremental(&text, &tools).await.expect("it reads");
                    got.content.push_str(&read.normal_text);
                    for call in read.calls {
                        got.call(call.tool_index, call.name.as_deref(), &call.parameters);
                    }
                }
            }
            if let Some(thoughts) = &mut thoughts {
                let read = thoughts.flush().expect("it reads");
                got.reasoning.push_str(&read.reasoning_text);
                texts.push(read.normal_text);
            }
            for text in texts.iter().filter(|text| !text.is_empty()) {
                let read = parser.parse_incremental(text, &tools).await.expect("it reads");
                got.content.push_str(&read.normal_text);
                for call in read.calls {
                    got.call(call.tool_index, call.name.as_deref(), &call.parameters);
                }
            }
            for call in parser.get_unstreamed_tool_args().unwrap_or_default() {
                got.call(call.tool_index, call.name.as_deref(), &call.parameters);
            }
            got.content.push_str(&parser.take_unstreamed_normal_text());
        });
        got
    })
}

fn dynamo(
    calls: String,
    reasoning: Option<String>,
    tools: &Value,
    pieces: Vec<String>,
) -> Box<dyn FnOnce() -> Got> {
    let tools = functions(tools).map(|function| ToolDefinition {
        name: function["name"].as_str().expect("a name").to_owned(),
        parameters: Some(function["parameters"].clone()),
        strict: None,
    });
    let mut builder =
        JailedStream::builder().tool_call_parser(calls).tool_definitions(tools.collect());
    let mut thoughts = None;
    if let Some(name) = reasoning {
        thoughts = Some(ReasoningParserType::get_reasoning_parser_from_name(&name));
        builder = builder.reasoning_parser(name);
    }
    let jail = builder.build();
    if thoughts.is_none() {
        // chunks are the server's own, so they are made before
        let chunks: Vec<_> = pieces.into_iter().map(|piece| chunk(Some(piece), false)).collect();
        return Box::new(move || jailed(jail, chunks, Got::default()));
    }
    Box::new(move || {
        let mut got = Got::default();
        let mut thoughts = thoughts.expect("checked above");
        let mut chunks = Vec::new();
        for piece in pieces {
            let read = thoughts.parse_reasoning_streaming_incremental(&piece, &[]);
            got.reasoning.push_str(&read.reasoning_text);
            chunks.push(chunk(Some(read.normal_text), false));
        }
        let read = thoughts.finish_reasoning_stream();
        got.reasoning.push_str(&read.reasoning_text);
        chunks.push(chunk(Some(read.normal_text), false));
        jailed(jail, chunks, got)
    })
}

type Chunk = Annotated<CreateChatCompletionStreamResponse>;

fn jailed(jail: JailedStream, mut chunks: Vec<Chunk>, mut got: Got) -> Got {
    chunks.push(chunk(None, true));
    let stream = jail.apply(futures::stream::iter(chunks));
    block_on(stream.for_each(|chunk| {
        for choice in chunk.data.into_iter().flat_map(|data| data.choices) {
            if let Some(ChatCompletionMessageContent::Text(text)) = choice.delta.content {
                got.content.push_str(&text);
            }
            for call in choice.delta.tool_calls.into_iter().flatten() {
                let function = call.function.as_ref();
                let arguments = function.and_then(|function| function.arguments.as_deref());
                let name = function.and_then(|function| function.name.as_deref());
                got.call(call.index as usize, name, arguments.unwrap_or_default());
            }
        }
        std::future::ready(())
    }));
    got
}

fn chunk(content: Option<String>, last: bool) -> Chunk {
    #[allow(deprecated)]
    let delta = ChatCompletionStreamResponseDelta {
        role: None,
        content: content.map(ChatCompletionMessageContent::Text),
        tool_calls: None,
        function_call: None,
        refusal: None,
        reasoning_content: None,
    };
    let finish_reason = last.then_some(FinishReason::Stop);
    let choice = ChatChoiceStream { index: 0, delta, finish_reason, logprobs: None };
    let data = CreateChatCompletionStreamResponse {
        id: String::new(),
        choices: vec![choice],
        created: 0,
        model: String::new(),
        system_fingerprint: None,
        object: "chat.completion.chunk".to_owned(),
        usage: None,
        service_tier: None,
    };
    Annotated { data: Some(data), id: None, event: None, comment: None, error: None }
}

fn dynamo_v2(family: &str, tools: &Value, pieces: Vec<String>) -> Box<dyn FnOnce() -> Got> {
    let tools = functions(tools).map(|function| Tool {
        name: function["name"].as_str().expect("a name").to_owned(),
        description: None,
        parameters: function["parameters"].clone(),
        strict: None,
    });
    let tools: Vec<Tool> = tools.collect();
    let mut parser = create_unified_parser_for_family(family, &tools).expect("it is a family");
    parser.initialize_request(UnifiedParserInit::default()).expect("nothing special");
    Box::new(move || {
        let mut got = Got::default();
        for piece in &pieces {
            let mut output = UnifiedParserOutput::default();
            parser.parse_into(piece, &mut output).expect("it reads");
            output.events.into_iter().for_each(|event| add_v2(&mut got, event));
        }
        let output = parser.finish().expect("it reads");
        output.events.into_iter().for_each(|event| add_v2(&mut got, event));
        got
    })
}

fn add_v2(got: &mut Got, event: UnifiedParserEvent) {
    match event {
        UnifiedParserEvent::Text(text) => got.content.push_str(&text),
        UnifiedParserEvent::Reasoning(text) => got.reasoning.push_str(&text),
        UnifiedParserEvent::ToolCall(call) => {
            got.call(call.tool_index, call.name.as_deref(), &call.arguments);
        }
        UnifiedParserEvent::MessageStart(_) | UnifiedParserEvent::MessageEnd => {}
    }
}
