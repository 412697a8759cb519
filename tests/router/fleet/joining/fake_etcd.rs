//! An etcd that says what the test wants.

use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Response};
use futures_util::stream;
use headrace_router::fleet::etcd::messages::{KeptAlive, LeaseGranted, LoggedIn};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::fake_worker::in_time;

/// What a call gets.
#[derive(Clone)]
pub(super) enum Says {
    /// A message, and that all is well.
    Message(Vec<u8>),
    /// A status of gRPC, and its text.
    Status(u16, &'static str),
    /// Something else over HTTP.
    Http(u16, &'static str),
}

/// A call: its path, the token that it showed, and its first message.
pub(super) struct Asked {
    pub(super) path: String,
    pub(super) token: Option<String>,
    message: Bytes,
}

impl Asked {
    pub(super) fn message<M: Message + Default>(&self) -> M {
        M::decode(self.message.clone()).unwrap()
    }
}

pub(super) struct FakeEtcd {
    pub(super) endpoint: String,
    asked: mpsc::UnboundedReceiver<Asked>,
}

impl FakeEtcd {
    /// `says` gets the path and how often it was asked before.
    pub(super) async fn start(says: impl FnMut(&str, usize) -> Says + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let (tell, asked) = mpsc::unbounded_channel();
        let state = Arc::new(Mutex::new((says, Vec::<String>::new())));
        let answer = move |request: Request| {
            let (state, tell) = (Arc::clone(&state), tell.clone());
            async move {
                let path = request.uri().path().to_owned();
                let token = request.headers().get("token");
                let token = token.map(|token| token.to_str().unwrap().to_owned());
                let message = first_message(request.into_body()).await;
                let says = {
                    let mut guard = state.lock().unwrap();
                    let before = guard.1.iter().filter(|other| **other == path).count();
                    guard.1.push(path.clone());
                    (guard.0)(&path, before)
                };
                let _ = tell.send(Asked { path, token, message });
                reply(says)
            }
        };
        tokio::spawn(async { axum::serve(listener, Router::new().fallback(answer)).await });
        Self { endpoint, asked }
    }

    pub(super) async fn any(&mut self) -> Asked {
        in_time("a call of etcd", self.asked.recv()).await.unwrap()
    }

    /// The next call, which has to be this one.
    pub(super) async fn next<M: Message + Default>(&mut self, path: &str) -> M {
        let asked = self.any().await;
        assert_eq!(asked.path, path);
        asked.message()
    }
}

/// The client may keep its side open, so the body has no end.
async fn first_message(mut body: Body) -> Bytes {
    let mut bytes = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        bytes.extend_from_slice(frame.data_ref().map_or(&[], |data| data));
        if bytes.len() >= 5 {
            let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap()) as usize;
            if bytes.len() >= 5 + length {
                return Bytes::copy_from_slice(&bytes[5..5 + length]);
            }
        }
    }
    Bytes::new()
}

fn reply(says: Says) -> Response<Body> {
    let grpc = Response::builder().header("content-type", "application/grpc");
    match says {
        Says::Message(message) => {
            let mut data = vec![0];
            data.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
            data.extend_from_slice(&message);
            let trailers = HeaderMap::from_iter([(
                "grpc-status".parse().unwrap(),
                HeaderValue::from_static("0"),
            )]);
            let frames = [Frame::data(Bytes::from(data)), Frame::trailers(trailers)];
            let body = StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>)));
            grpc.body(Body::new(body)).unwrap()
        }
        Says::Status(code, text) => {
            let grpc = grpc.header("grpc-status", code).header("grpc-message", text);
            grpc.body(Body::empty()).unwrap()
        }
        Says::Http(status, text) => {
            Response::builder().status(status).body(Body::from(text)).unwrap()
        }
    }
}

/// As an etcd whose lease lives for `rounds` of keep-alives, and which lets everybody in.
pub(super) fn good(rounds: usize) -> impl FnMut(&str, usize) -> Says + Send + 'static {
    move |path, before| {
        Says::Message(match path {
            "/etcdserverpb.Lease/LeaseGrant" => {
                LeaseGranted { id: 77 + i64::try_from(before).unwrap() }.encode_to_vec()
            }
            "/etcdserverpb.Lease/LeaseKeepAlive" => {
                KeptAlive { ttl_s: if before < rounds { 2 } else { 0 } }.encode_to_vec()
            }
            "/etcdserverpb.Auth/Authenticate" => {
                LoggedIn { token: format!("token-{before}") }.encode_to_vec()
            }
            _ => Vec::new(),
        })
    }
}

/// A file of `tests/data`.
pub(super) fn data(name: &str) -> Option<std::path::PathBuf> {
    Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name))
}
