//! A worker without a model: real sockets, real frames, and every misbehaviour that a test asks for.

#![allow(clippy::wildcard_enum_match_arm, reason = "a test names what it waits for, not all else")]
#![allow(clippy::large_enum_variant, reason = "a test has few of them")]

mod dial;
mod frames;
mod looks;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use headrace_router::app::App;
use headrace_router::config::{Config, RouterArgs};
use headrace_router::core::frame::*;
use headrace_router::core::secret::{AuthKey, Side};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

pub(crate) use self::dial::*;
pub(crate) use self::frames::*;
pub(crate) use self::looks::*;

/// What is logged first while nobody listens is taken for what nobody listens to, by all threads; a test that keeps the log
/// of its thread at that moment would find it empty.
fn listen_to_all() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let nowhere = tracing_subscriber::fmt().with_writer(std::io::sink).finish();
        let _ = tracing::subscriber::set_global_default(nowhere); // another one serves as well
    });
}

/// A router on free ports; `change` sets its flags.
pub(crate) async fn start_router(change: impl FnOnce(&mut RouterArgs)) -> Arc<App> {
    listen_to_all();
    let mut args = RouterArgs {
        port: 0,
        worker_listen: "127.0.0.1:0".into(),
        secret: None,
        api_key: Vec::new(),
        tokenizer_threads: 1,
        ..RouterArgs::default()
    };
    change(&mut args);
    App::start(Config::try_from(args).unwrap()).await.unwrap()
}

/// How a worker answers by itself: the tokens of each step, and the end.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    pub(crate) steps: Vec<Vec<u32>>,
    pub(crate) finish: Finish,
}

impl Script {
    /// One step for each character, then the stop token.
    pub(crate) fn says(text: &str) -> Self {
        let mut steps: Vec<_> = letters(text).into_iter().map(|id| vec![id]).collect();
        steps.push(vec![EOS]);
        Self { steps, finish: Finish::Stop }
    }
}

type Automatic = Arc<dyn Fn(&Submit) -> Option<Script> + Send + Sync>;

/// What a worker is and does. Change what the test is about.
#[derive(Clone)]
pub(crate) struct Behaviour {
    pub(crate) hello: Hello,
    pub(crate) secret: Option<String>,
    pub(crate) doc: Vec<u8>,
    /// Sends its snapshot after the welcome.
    pub(crate) snapshots: bool,
    /// Answers `Describe` with its document.
    pub(crate) describes: bool,
    /// Sends heartbeats and answers Ping.
    pub(crate) lives: bool,
    /// Answers Cancel with Freed.
    pub(crate) frees: bool,
    /// Answers requests by itself; `None` leaves that request to the test.
    pub(crate) automatic: Option<Automatic>,
}

impl Behaviour {
    /// A good worker that leaves the answers to the test.
    pub(crate) fn new(worker: &str) -> Self {
        Self {
            hello: hello(worker),
            secret: None,
            doc: doc().to_string().into_bytes(),
            snapshots: true,
            describes: true,
            lives: true,
            frees: true,
            automatic: None,
        }
    }

    /// One of this role.
    pub(crate) fn of_role(worker: &str, role: Role) -> Self {
        let mut behaviour = Self::new(worker);
        behaviour.hello.role = role;
        behaviour.hello.transfer = vec![format!("tcp:{worker}:1")];
        behaviour.hello.kv_block_bytes = 1 << 16;
        behaviour
    }

    /// A good worker that always says the same.
    pub(crate) fn says(worker: &str, text: &str) -> Self {
        let script = Script::says(text);
        Self::new(worker).answers(move |_| Some(script.clone()))
    }

    /// Answers by itself.
    pub(crate) fn answers(
        mut self,
        automatic: impl Fn(&Submit) -> Option<Script> + Send + Sync + 'static,
    ) -> Self {
        self.automatic = Some(Arc::new(automatic));
        self
    }

    /// Joins and waits until the router takes it for ready.
    pub(crate) async fn ready(self, app: &App) -> FakeWorker {
        let name = self.hello.worker.clone();
        let worker = self.join(app).await.unwrap();
        until(&format!("{name} is ready"), || state_of(app, &name) == "ready").await;
        worker
    }

    /// Joins as soon as its name is not that of a living worker any more.
    pub(crate) async fn join_when_free(self, app: &App) -> FakeWorker {
        let dials = async {
            loop {
                match self.clone().join(app).await {
                    Ok(worker) => return worker,
                    Err(refuse) if refuse.is_for_now() => {}
                    Err(refuse) => panic!("{refuse:?}"),
                }
                sleep(Duration::from_millis(1)).await;
            }
        };
        in_time("the name", dials).await
    }

    /// Dials and goes through the handshake.
    pub(crate) async fn join(self, app: &App) -> Result<FakeWorker, Box<Refuse>> {
        let (mut reader, mut writer) = dial(app.fleet.address()).await;
        send(&mut writer, Frame::Hello(self.hello.clone())).await;
        let welcome = match receive(&mut reader).await {
            Some(Frame::Welcome(welcome)) => welcome,
            Some(Frame::Refuse(refuse)) => return Err(Box::new(refuse)),
            other => panic!("neither welcome nor refusal: {other:?}"),
        };
        if !welcome.challenge.is_empty() {
            let key = AuthKey::derive(self.secret.clone().unwrap_or_default().as_bytes());
            let proof = key.proof(Side::Worker, &welcome.challenge).to_vec();
            send(&mut writer, Frame::Prove(Prove { proof })).await;
        }
        let mut early = None;
        if !welcome.challenge.is_empty() {
            // a wrong secret is refused late, a right one may not be answered at all
            match timeout(Duration::from_millis(300), reader.next()).await {
                Ok(Ok(Some(Frame::Refuse(refuse)))) => return Err(Box::new(refuse)),
                Ok(frame) => early = frame.unwrap(),
                Err(_) => {}
            }
        }
        if self.snapshots {
            let (epoch, hashes) = (self.hello.epoch, Vec::new());
            let snapshot = Snapshot { epoch, sequence: 0, hashes, last: true };
            send(&mut writer, Frame::Snapshot(snapshot)).await;
        }
        let (commands, inbox) = mpsc::unbounded_channel();
        let (events, outbox) = mpsc::unbounded_channel();
        let heartbeat = Duration::from_millis(welcome.heartbeat_ms.into());
        let name = self.hello.worker.clone();
        tokio::spawn(serve(self, reader, writer, heartbeat, early, inbox, events));
        Ok(FakeWorker { commands, events: outbox, welcome, name })
    }
}

/// What a worker got.
#[derive(Debug)]
pub(crate) enum Event {
    Submit(Submit),
    Cancel(RequestId),
    Describe(String),
    Drain(Drain),
    Fetch(Fetch),
    Ticket(Ticket),
    Continue(Continue),
    Ping,
    Resync(String),
    /// The router closed the link.
    Closed,
}

enum Command {
    Send(Frame),
    SendRaw(Vec<u8>),
    /// Neither read nor write, keep the link open.
    Freeze,
    /// Reads and writes again after `Freeze`.
    Thaw,
}

/// A worker that joined. Dropping it closes its link, as death does.
pub(crate) struct FakeWorker {
    commands: mpsc::UnboundedSender<Command>,
    events: mpsc::UnboundedReceiver<Event>,
    pub(crate) welcome: Welcome,
    name: String,
}

impl FakeWorker {
    /// What came next, pings left out.
    pub(crate) async fn event(&mut self) -> Event {
        loop {
            match in_time("an event of the worker", self.events.recv()).await {
                Some(Event::Ping) => {}
                Some(event) => return event,
                None => return Event::Closed,
            }
        }
    }

    /// The next request; other events before it are skipped.
    pub(crate) async fn submitted(&mut self) -> Submit {
        loop {
            match self.event().await {
                Event::Submit(submit) => return submit,
                Event::Closed => panic!("the link closed before a submit"),
                _ => {}
            }
        }
    }

    /// The next ticket; other events before it are skipped.
    pub(crate) async fn ticket(&mut self) -> Ticket {
        loop {
            match self.event().await {
                Event::Ticket(ticket) => return ticket,
                Event::Closed => panic!("the link closed before a ticket"),
                _ => {}
            }
        }
    }

    /// The tokens after which it is to go on; other events before are skipped.
    pub(crate) async fn told_to_go_on(&mut self) -> (RequestId, Vec<u32>) {
        loop {
            match self.event().await {
                Event::Continue(Continue { request, generated }) => {
                    let ids = generated.chunks_exact(4);
                    let ids = ids.map(|id| u32::from_le_bytes(id.try_into().unwrap()));
                    return (request, ids.collect());
                }
                Event::Closed => panic!("the link closed before it was told to go on"),
                _ => {}
            }
        }
    }

    /// The next cancelled request; other events before it are skipped.
    pub(crate) async fn cancelled(&mut self) -> RequestId {
        loop {
            match self.event().await {
                Event::Cancel(request) => return request,
                Event::Closed => panic!("the link closed before a cancel"),
                _ => {}
            }
        }
    }

    /// What came next, pings too; `None` once the router closed the link.
    pub(crate) async fn events_until_closed(&mut self) -> Option<Event> {
        let event = in_time("an event of the worker", self.events.recv()).await;
        event.filter(|event| !matches!(event, Event::Closed))
    }

    /// Returns when the router closed the link.
    pub(crate) async fn closed(&mut self) {
        while !matches!(self.event().await, Event::Closed) {}
    }

    /// Events so far.
    pub(crate) fn so_far(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.events.try_recv().ok()).collect()
    }

    /// Hangs up, and waits until the router knows.
    pub(crate) async fn leaves(self, app: &App) {
        let name = self.name.clone();
        drop(self);
        until("it is gone", || state_of(app, &name).is_empty()).await;
    }

    pub(crate) fn send(&self, frame: Frame) {
        let _ = self.commands.send(Command::Send(frame));
    }

    pub(crate) fn send_raw(&self, bytes: &[u8]) {
        let _ = self.commands.send(Command::SendRaw(bytes.to_vec()));
    }

    /// A step with tokens for one request.
    pub(crate) fn gives(&self, request: RequestId, ids: &[u32], finish: Option<Finish>) {
        self.send(Frame::Step(step(vec![output(request, ids.to_vec(), finish)])));
    }

    /// Neither reads nor writes from now on; the link stays open.
    pub(crate) fn freeze(&self) {
        let _ = self.commands.send(Command::Freeze);
    }

    /// Goes on after [`Self::freeze`].
    pub(crate) fn thaw(&self) {
        let _ = self.commands.send(Command::Thaw);
    }
}

async fn serve(
    behaviour: Behaviour,
    mut reader: Reader,
    mut writer: Writer,
    heartbeat: Duration,
    early: Option<Frame>,
    mut commands: mpsc::UnboundedReceiver<Command>,
    events: mpsc::UnboundedSender<Event>,
) {
    let mut beat = Instant::now();
    let mut load = Load::default();
    let mut out = Vec::new();
    if let Some(frame) = early {
        let _ = events.send(receive_one(&behaviour, frame, &mut out));
    }
    loop {
        tokio::select! {
            command = commands.recv() => match command {
                None => return,
                Some(Command::Send(frame)) => {
                    if let Frame::Step(step) = &frame {
                        load = step.load;
                    }
                    out.push(frame);
                }
                Some(Command::SendRaw(bytes)) => {
                    let _ = writer.raw(&bytes).await;
                }
                Some(Command::Freeze) => loop {
                    match commands.recv().await {
                        None => return,
                        Some(Command::Thaw) => break,
                        Some(_) => {}
                    }
                },
                Some(Command::Thaw) => {}
            },
            () = sleep_until(beat), if behaviour.lives => {
                beat = Instant::now() + heartbeat;
                out.push(Frame::Step(Step { load, ..step(vec![]) }));
            }
            frame = reader.next() => {
                let event = match frame {
                    Ok(Some(frame)) => receive_one(&behaviour, frame, &mut out),
                    Ok(None) | Err(_) => Event::Closed,
                };
                let closed = matches!(event, Event::Closed);
                let _ = events.send(event);
                if closed {
                    return;
                }
            }
        }
        if writer.send(&std::mem::take(&mut out)).await.is_err() {
            let _ = events.send(Event::Closed);
            return;
        }
    }
}

fn receive_one(behaviour: &Behaviour, frame: Frame, out: &mut Vec<Frame>) -> Event {
    match frame {
        Frame::Submit(submit) => {
            let script = behaviour.automatic.as_ref().and_then(|answer| answer(&submit));
            if let Some(script) = script {
                out.extend(play(submit.request, script));
            }
            Event::Submit(submit)
        }
        Frame::Cancel(Cancel { request }) => {
            if behaviour.frees {
                out.push(Frame::Freed(Freed { request, blocks: 1 }));
            }
            Event::Cancel(request)
        }
        Frame::Describe(Describe { fingerprint }) => {
            if behaviour.describes {
                out.extend(model_parts(&fingerprint, &behaviour.doc));
            }
            Event::Describe(fingerprint)
        }
        Frame::Drain(drain) => Event::Drain(drain),
        Frame::Fetch(fetch) => Event::Fetch(fetch),
        Frame::Ticket(ticket) => Event::Ticket(ticket),
        Frame::Continue(go_on) => Event::Continue(go_on),
        Frame::Ping(_) => {
            if behaviour.lives {
                out.push(Frame::Step(step(vec![])));
            }
            Event::Ping
        }
        Frame::Resync(Resync { reason }) => Event::Resync(reason),
        other => panic!("no router sends {other:?}"),
    }
}

fn play(request: RequestId, script: Script) -> impl Iterator<Item = Frame> {
    let last = script.steps.len() - 1;
    let frames = script.steps.into_iter().enumerate().map(move |(i, ids)| {
        let finish = (i == last).then_some(script.finish);
        let cached_tokens = (i == 0).then_some(0);
        let output = Output { cached_tokens, ..output(request, ids, finish) };
        Frame::Step(Step { step: i as u64 + 1, ..step(vec![output]) })
    });
    frames.chain([Frame::Freed(Freed { request, blocks: 1 })])
}

impl Debug for FakeWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeWorker")
    }
}
