//! The state of one rendering: who is bound to what where, and the places of what can change.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::Program;
use super::budget::Budget;
use super::error::Error;
use super::library::functions::Function;
use super::tree::{For, Name};
use super::value::text;
use super::value::{List, Map, Value};

/// One rendering.
///
/// Every name has a stack of bindings, each with the frame that it belongs to; the newest one counts, unless it belongs to
/// whoever called the macro that runs.
#[derive(Debug)]
pub(crate) struct Machine<'r> {
    pub(crate) budget: Budget,
    pub(crate) program: &'r Program,
    given: Vec<Option<Value<'r>>>,
    bindings: Vec<Vec<(usize, Value<'r>)>>,
    frames: Vec<Frame>,
    /// The frame of the macro that runs.
    saturation: usize,
    /// What that macro captured.
    closure: Option<usize>,
    closures: Vec<HashMap<Name, Value<'r>>>,
    pub(crate) namespaces: Vec<BTreeMap<Rc<str>, Value<'r>>>,
    pub(crate) loops: Vec<Loop<'r>>,
    /// The loops that run, inside the macro that runs: the loop, and whether it may be called.
    pub(crate) running: Vec<(usize, Option<&'r For>)>,
    loop_name: Option<Name>,
    out: String,
    captures: Vec<String>,
    /// What a block wrote and its filters have not taken yet.
    pub(crate) piped: Vec<Value<'r>>,
}

#[derive(Debug, Default)]
struct Frame {
    bound: Vec<Name>,
    /// Where macros declared in this frame see its variables.
    closure: Option<usize>,
}

/// What `loop` is.
#[derive(Debug)]
pub(crate) struct Loop<'r> {
    pub(crate) iter: Iter<'r>,
    /// Position of the current item; `None` before the first.
    pub(crate) index: Option<usize>,
    pub(crate) length: Option<usize>,
    pub(crate) depth: usize,
    pub(crate) previous: Option<Value<'r>>,
    pub(crate) current: Option<Value<'r>>,
    pub(crate) changed: Option<Vec<Value<'r>>>,
    /// Somebody may have kept it: its place is not used again.
    pub(crate) kept: bool,
}

/// Items of a value, one by one.
#[derive(Debug)]
pub(crate) enum Iter<'r> {
    Items(List<'r>, usize),
    Chars(text::Text<'r>, usize),
    Keys(Rc<Map<'r>>, usize),
    None,
}

/// What a frame, a binding, an entry of a closure and a loop take, with what their containers keep in reserve.
const FRAME_BYTES: usize = 96;
const BINDING_BYTES: usize = 160;
const LOOP_BYTES: usize = 2 * size_of::<Loop<'_>>() + 64;

impl<'r> Machine<'r> {
    pub(crate) fn new(
        program: &'r Program,
        given: impl IntoIterator<Item = (&'r str, Value<'r>)>,
        budget: Budget,
    ) -> Self {
        let names = program.names.len();
        let mut machine = Self {
            budget,
            program,
            given: vec![None; names],
            bindings: vec![Vec::new(); names],
            frames: vec![Frame::default()],
            saturation: 0,
            closure: None,
            closures: Vec::new(),
            namespaces: Vec::new(),
            loops: Vec::new(),
            running: Vec::new(),
            loop_name: program.find("loop"),
            out: String::new(),
            captures: Vec::new(),
            piped: Vec::new(),
        };
        for (name, value) in given {
            if let Some(name) = program.find(name) {
                machine.given[name] = Some(value);
            }
        }
        machine
    }

    pub(crate) fn into_output(self) -> String {
        self.out
    }

    pub(crate) fn into_budget(self) -> Budget {
        self.budget
    }

    /// What `name` stands for, if for anything.
    pub(crate) fn lookup(&self, name: Name) -> Option<Value<'r>> {
        if let Some((frame, value)) = self.bindings[name].last()
            && *frame >= self.saturation
        {
            return Some(value.clone());
        }
        if let Some(closure) = self.closure
            && let Some(value) = self.closures[closure].get(&name)
        {
            return Some(value.clone());
        }
        if let Some(value) = &self.given[name] {
            return Some(value.clone());
        }
        Function::by_name(&self.program.names[name]).map(Value::Function)
    }

    /// Binds `name` in the innermost frame.
    pub(crate) fn bind(&mut self, name: Name, value: Value<'r>) -> Result<(), Error> {
        let frame = self.frames.len() - 1;
        if let Some(closure) = self.frames[frame].closure {
            self.budget.memory(BINDING_BYTES)?;
            self.closures[closure].insert(name, value.clone());
        }
        self.bind_here(name, value)
    }

    fn bind_here(&mut self, name: Name, value: Value<'r>) -> Result<(), Error> {
        let frame = self.frames.len() - 1;
        match self.bindings[name].last_mut() {
            Some((bound, old)) if *bound == frame => *old = value,
            _ => {
                let (bindings, bound) = (&mut self.bindings[name], &mut self.frames[frame].bound);
                if bindings.len() == bindings.capacity() {
                    self.budget.memory(BINDING_BYTES * (bindings.len() + 2))?;
                }
                if bound.len() == bound.capacity() {
                    self.budget.memory(16 * (bound.len() + 2))?;
                }
                bindings.push((frame, value));
                bound.push(name);
            }
        }
        Ok(())
    }

    pub(crate) fn push_frame(&mut self) -> Result<(), Error> {
        if self.frames.len() == self.frames.capacity() {
            self.budget.memory(FRAME_BYTES * (self.frames.len() + 2))?;
        }
        self.frames.push(Frame::default());
        Ok(())
    }

    pub(crate) fn pop_frame(&mut self) {
        self.clear_frame();
        self.frames.pop();
    }

    /// Forgets what is bound in the innermost frame.
    pub(crate) fn clear_frame(&mut self) {
        let mut bound = match self.frames.last_mut() {
            Some(frame) => std::mem::take(&mut frame.bound),
            None => return,
        };
        for name in bound.drain(..) {
            self.bindings[name].pop();
        }
        if let Some(frame) = self.frames.last_mut() {
            frame.bound = bound;
        }
    }

    /// Opens the frame of a macro with what it captured; [`Self::leave_macro`] goes back.
    pub(crate) fn enter_macro(&mut self, closure: Option<usize>) -> Result<ReturnTo<'r>, Error> {
        self.push_frame()?;
        let saturation = std::mem::replace(&mut self.saturation, self.frames.len() - 1);
        let closure = std::mem::replace(&mut self.closure, closure);
        Ok(ReturnTo { saturation, closure, running: std::mem::take(&mut self.running) })
    }

    pub(crate) fn leave_macro(&mut self, caller: ReturnTo<'r>) {
        self.pop_frame();
        self.saturation = caller.saturation;
        self.closure = caller.closure;
        self.running = caller.running;
    }

    /// Where a macro that is declared here finds `names` later.
    pub(crate) fn capture_names(&mut self, names: &[Name]) -> Result<Option<usize>, Error> {
        let frame = self.frames.len() - 1;
        if names.is_empty() {
            return Ok(self.frames[frame].closure);
        }
        let closure = match self.frames[frame].closure {
            Some(closure) => closure,
            None => {
                self.budget.memory(4 * FRAME_BYTES)?;
                self.closures.push(HashMap::new());
                self.frames[frame].closure = Some(self.closures.len() - 1);
                self.closures.len() - 1
            }
        };
        for name in names {
            self.budget.items(1)?;
            if !self.closures[closure].contains_key(name) {
                self.budget.memory(BINDING_BYTES)?;
                let value = self.lookup(*name).unwrap_or_default();
                self.keep(&value);
                self.closures[closure].insert(*name, value);
            }
        }
        Ok(Some(closure))
    }

    /// Writes text to where output goes now.
    pub(crate) fn write(&mut self, part: &str) -> Result<(), Error> {
        if self.captures.is_empty() {
            self.budget.output(part.len())?;
        }
        text::push(&mut self.out, part, &self.budget)
    }

    /// From here on, what is written is kept for [`Self::captured`].
    pub(crate) fn capture(&mut self) -> Result<(), Error> {
        self.budget.memory(FRAME_BYTES)?;
        self.captures.push(std::mem::take(&mut self.out));
        Ok(())
    }

    pub(crate) fn captured(&mut self) -> Result<Value<'r>, Error> {
        let outer = self.captures.pop().unwrap_or_default();
        let text = std::mem::replace(&mut self.out, outer);
        Ok(Value::Text(text::Text::built(text, &self.budget)?))
    }

    /// Starts a loop in a frame of its own.
    pub(crate) fn push_loop(
        &mut self,
        iter: Iter<'r>,
        decl: Option<&'r For>,
    ) -> Result<usize, Error> {
        if self.loops.len() == self.loops.capacity() {
            self.budget.memory(LOOP_BYTES * (self.loops.len() + 2))?;
        }
        let outer = self.running.last().filter(|(_, decl)| decl.is_some_and(|d| d.recursive));
        let depth = outer.map_or(0, |(id, _)| self.loops[*id].depth + 1);
        let length = iter.length();
        self.loops.push(Loop {
            iter,
            index: None,
            length,
            depth,
            previous: None,
            current: None,
            changed: None,
            kept: false,
        });
        let id = self.loops.len() - 1;
        self.running.push((id, decl));
        self.push_frame()?;
        Ok(id)
    }

    /// The next item of the innermost loop, in a frame without names but `loop`, if the loop has one.
    pub(crate) fn next_item(&mut self, id: usize, named: bool) -> Result<Option<Value<'r>>, Error> {
        self.budget.step()?;
        self.budget.items(2)?;
        let state = &mut self.loops[id];
        state.index = Some(state.index.map_or(0, |i| i + 1));
        state.previous = state.current.take();
        state.current = state.iter.next();
        let item = state.current.clone();
        if item.is_some() {
            self.clear_frame();
        }
        if named && let Some(name) = self.loop_name {
            self.bind_here(name, Value::Loop(id))?;
        }
        Ok(item)
    }

    pub(crate) fn pop_loop(&mut self, id: usize) {
        self.pop_frame();
        self.running.pop();
        if id + 1 == self.loops.len() && !self.loops[id].kept {
            self.loops.pop();
        }
    }

    /// Notes that a loop may be read after it ended.
    pub(crate) fn keep(&mut self, value: &Value<'r>) {
        if let Value::Loop(id) = value {
            self.loops[*id].kept = true;
        }
    }
}

/// What a macro's end goes back to.
pub(crate) struct ReturnTo<'r> {
    saturation: usize,
    closure: Option<usize>,
    running: Vec<(usize, Option<&'r For>)>,
}

impl<'r> Loop<'r> {
    /// The item after the current one.
    pub(crate) fn peek(&self) -> Value<'r> {
        let mut ahead = match &self.iter {
            Iter::Items(list, at) => Iter::Items(list.clone(), *at),
            Iter::Chars(text, at) => Iter::Chars(text.clone(), *at),
            Iter::Keys(map, at) => Iter::Keys(Rc::clone(map), *at),
            Iter::None => Iter::None,
        };
        ahead.next().unwrap_or_default()
    }
}

impl<'r> Iter<'r> {
    pub(crate) fn next(&mut self) -> Option<Value<'r>> {
        match self {
            Self::Items(list, at) => {
                let item = list.get(*at)?;
                *at += 1;
                Some(item)
            }
            Self::Chars(text, at) => {
                let c = text.read()[*at..].chars().next()?;
                let start = *at;
                *at += c.len_utf8();
                Some(Value::Text(text.part(start, *at)))
            }
            Self::Keys(map, at) => {
                let key = map.entry(*at)?.0.clone();
                *at += 1;
                Some(key)
            }
            Self::None => None,
        }
    }

    /// How many items there are; minijinja does not say it of characters.
    fn length(&self) -> Option<usize> {
        match self {
            Self::Items(list, _) => Some(list.len()),
            Self::Chars(text, _) => text.is_empty().then_some(0),
            Self::Keys(map, _) => Some(map.len()),
            Self::None => Some(0),
        }
    }
}
