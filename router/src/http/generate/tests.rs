//! Where bodies are parsed.

use axum::body::Body;

use super::*;
use crate::config::{Config, RouterArgs};

#[tokio::test]
async fn a_large_body_is_parsed_away_from_the_sockets_and_keeps_what_was_made_of_it_alone() {
    let args = RouterArgs { port: 0, worker_listen: "127.0.0.1:0".into(), ..RouterArgs::default() };
    let app = App::start(Config::try_from(args).unwrap()).await.unwrap();
    let (surface, here) = (Surface::of(&app), std::thread::current().id());
    for (length, inline) in [(100, true), (LARGE_BODY_BYTES - 1, true), (LARGE_BODY_BYTES, false)] {
        for _ in 0..2 * app.memory.parsers.available_permits() {
            let mut body = br#"{"model": "m"}"#.to_vec();
            body.resize(length, b' ');
            let request = Request::new(Body::from(body));
            let check = move |read: ReadBody| Ok((std::thread::current().id(), read.memory.used()));
            let (thread, used) = read(&surface, request, None, check).await.unwrap();
            assert_eq!(thread == here, inline, "{length}");
            assert!(used < 1_000, "{used} of {length}: its spaces are gone");
        }
    }
}
