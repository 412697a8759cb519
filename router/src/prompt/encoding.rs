//! One prompt on its way through the pool: rendered in one turn, then tokenised piece by piece.

mod chat;

use std::sync::Arc;

pub(super) use self::chat::{Rendering, chat_bytes};
use super::pool::{Lane, Turn, Turns};
use super::template::{ChatPrompt, Prepared};
use super::tokenize::{PIECE_BYTES, SLOW_BYTES, Walk, WalkError, WalkLimits, Walked};
use super::{Model, Room};
use crate::error::RouteError;
use crate::limits::memory::MemoryShare;

/// The prompt, before tokenisation.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// Messages for the chat template.
    Chat(Box<ChatPrompt>),
    /// Text that is tokenised with what the tokenizer puts around one.
    Text(String),
    /// Text that is tokenised as it is.
    Bare(String),
    /// Token ids of the model, which are not tokenised.
    Tokens(Vec<u32>),
}

/// What is to become tokens.
#[derive(Debug)]
pub(super) enum Input {
    Chat(Box<ChatPrompt>),
    /// `special`: with what the tokenizer puts around a text.
    Text {
        text: String,
        special: bool,
    },
}

/// The work of one prompt.
#[derive(Debug)]
pub(super) struct Encoding {
    model: Arc<Model>,
    room: Room,
    /// Sets its texts apart in the cache.
    salt: Vec<u8>,
    state: State,
    /// The field of the request that it comes from.
    param: &'static str,
    /// What the prompt was charged.
    _charge: Option<Arc<MemoryShare>>,
}

#[derive(Debug)]
enum State {
    New(Input),
    /// Its rendering takes longer than those that the quick lane has time for.
    Prepared(Prepared),
    Walking(Walk),
    /// Its result was given.
    Over,
}

/// Bytes of a text that is tokenised on the thread that asks for it, which other connections wait for: some 0.1 ms, where the
/// way to another thread and back is as long.
pub(super) const HERE_BYTES: usize = 4 << 10;

/// Whatever takes too long in one lane is for the next one.
fn later<T>(left: usize, lane: Lane) -> Turn<T> {
    let lane = match lane {
        Lane::Here => Lane::Quick,
        Lane::Quick | Lane::Slow => Lane::Slow,
    };
    Turn::More { left, lane }
}

/// What came of a chat in one turn.
enum Rendered {
    Walk(Walk),
    /// Too much work for this lane, with so many bytes.
    Later {
        left: usize,
    },
}

impl Input {
    /// Where a chat of so many bytes is rendered: a template cannot be stopped in the middle, so long chats hold up only
    /// each other. So do those that bring their own template, which has to be read first.
    pub(super) fn lane_of(chat: &ChatPrompt, chat_bytes: usize) -> Lane {
        if chat_bytes > SLOW_BYTES || chat.template.is_some() { Lane::Slow } else { Lane::Quick }
    }
}

impl Encoding {
    pub(super) fn new(
        model: Arc<Model>,
        input: Input,
        room: Room,
        param: &'static str,
        salt: Vec<u8>,
        charge: Option<Arc<MemoryShare>>,
    ) -> Self {
        Self { model, room, salt, state: State::New(input), param, _charge: charge }
    }

    /// A new prompt becomes a text; then its tokens are found, as far as one turn goes.
    fn go_on(&mut self, lane: Lane) -> Result<Turn<Vec<u32>>, RouteError> {
        let mut walk = match std::mem::replace(&mut self.state, State::Over) {
            // its length was looked at before
            State::New(Input::Text { text, special }) => self.walk(text, special),
            State::New(Input::Chat(mut chat)) => {
                let special = chat.add_special_tokens;
                if let Some(own) = self.model.template_of(&mut chat)? {
                    let prepared = own.prepare(*chat)?;
                    let text = own.render(&prepared, Some(self.model.longest_text()))?;
                    self.model.check_length(&text, self.room)?;
                    self.walk(text, special)
                } else {
                    let prepared = self.model.template()?.prepare(*chat)?;
                    match self.rendered(prepared, lane)? {
                        Rendered::Walk(walk) => walk,
                        Rendered::Later { left } => return Ok(later(left, lane)),
                    }
                }
            }
            State::Prepared(prepared) => match self.rendered(prepared, lane)? {
                Rendered::Walk(walk) => walk,
                Rendered::Later { left } => return Ok(later(left, lane)),
            },
            State::Walking(walk) => walk,
            State::Over => {
                return Err(RouteError::mistake("a prompt was tokenised twice"));
            }
        };
        let most_here = match lane {
            Lane::Here => HERE_BYTES,
            // a text that was rendered slowly is tokenised beside the others
            Lane::Slow if walk.is_new() => PIECE_BYTES,
            Lane::Quick | Lane::Slow => usize::MAX,
        };
        let walked = if walk.left() > most_here {
            Walked::Pausing { slow: false }
        } else {
            let limits = WalkLimits {
                tokens: self.room.prompt(),
                stretch_bytes: self.model.stretch_bytes,
                slow: lane == Lane::Slow,
            };
            self.model.text.go_on(&mut walk, &limits).map_err(|error| self.refuse(&walk, error))?
        };
        match walked {
            Walked::Done(ids) => {
                self.model.check_ids(&ids, self.param)?;
                Ok(Turn::Done(ids))
            }
            Walked::Pausing { slow } => {
                let left = walk.left();
                self.state = State::Walking(walk);
                Ok(Turn::More { left, lane: if slow { Lane::Slow } else { Lane::Quick } })
            }
        }
    }

    /// But for the slow lane only what is rendered quickly.
    fn rendered(&mut self, prepared: Prepared, lane: Lane) -> Result<Rendered, RouteError> {
        let (template, longest) = (self.model.template()?, Some(self.model.longest_text()));
        let text = match lane {
            Lane::Here | Lane::Quick => {
                template.render_quickly(&prepared, longest, lane == Lane::Here)?
            }
            Lane::Slow => Some(template.render(&prepared, longest)?),
        };
        let Some(text) = text else {
            let left = chat_bytes(prepared.chat());
            self.state = State::Prepared(prepared);
            return Ok(Rendered::Later { left });
        };
        self.model.check_length(&text, self.room)?;
        Ok(Rendered::Walk(self.walk(text, prepared.chat().add_special_tokens)))
    }

    fn walk(&mut self, text: String, special: bool) -> Walk {
        self.model.text.begin(text, special).salted(std::mem::take(&mut self.salt))
    }

    fn refuse(&self, walk: &Walk, error: WalkError) -> RouteError {
        match error {
            WalkError::TooMany(so_far) => {
                // what is left needs tokens, too
                let left = self.model.text.least().of(walk.rest());
                self.room.exceeded(so_far.saturating_add(left))
            }
            WalkError::Uncut(at) => {
                let (param, limit) = (self.param.to_owned(), self.model.stretch_bytes);
                RouteError::TextWithoutBreaks { param, at, limit }
            }
            WalkError::Tokenizer(error) => RouteError::internal("a prompt has no tokens", error),
        }
    }
}

impl Turns for Encoding {
    type Output = Result<Vec<u32>, RouteError>;

    fn turn(&mut self, lane: Lane) -> Turn<Self::Output> {
        match self.go_on(lane) {
            Ok(Turn::Done(ids)) => Turn::Done(Ok(ids)),
            Ok(Turn::More { left, lane }) => Turn::More { left, lane },
            Err(error) => Turn::Done(Err(error)),
        }
    }
}
