//! The bare write loop: a server in the router's place that writes prepared events to all its clients at a pace, with one `write`
//! an event and nothing else. What a router's token costs is compared with what an event costs here.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// A bare server of streams.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct WritesArgs {
    /// Milliseconds between two events of a stream.
    #[arg(long, default_value_t = 20.0)]
    step_ms: f64,
    /// Events of a stream.
    #[arg(long, default_value_t = 128)]
    events: usize,
}

const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
    cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
const LAST: &[u8] = b"0\r\n\r\n";
/// Whoever asks first what models there are.
const MODELS: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n\
    {\"object\":\"list\",\"data\":[{\"id\":\"bare\"}]}";
/// A chunk as the router writes one.
const EVENT: &str = r#"data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"SmolLM2-135M-Instruct","service_tier":"default","system_fingerprint":"headrace-0.1.0","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}],"usage":null}"#;

/// A client, and how many events it is still to get.
struct Client {
    stream: TcpStream,
    left: usize,
}

/// Serves for ever; prints its address.
///
/// # Errors
/// It cannot listen.
pub(crate) fn run(args: &WritesArgs) -> anyhow::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    crate::print(&format_args!("http://{}\n", listener.local_addr()?));
    let chunk = |event: &str| format!("{:x}\r\n{event}\n\n\r\n", event.len() + 2).into_bytes();
    let (event, done) = (chunk(EVENT), [chunk("data: [DONE]"), LAST.to_vec()].concat());
    let pause = Duration::from_secs_f64(args.step_ms / 1e3);
    let (mut clients, mut next): (Vec<Client>, _) = (Vec::new(), Instant::now());
    let mut bytes = [0; 64 << 10];
    loop {
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            clients.push(Client { stream, left: 0 });
        }
        clients.retain_mut(|client| {
            if client.left == 0 {
                match client.stream.read(&mut bytes) {
                    Ok(0) => return false,
                    Ok(_) if bytes.starts_with(b"GET") => {
                        return client.stream.write_all(MODELS).is_ok();
                    }
                    // a request is one write of its client, and comes as a whole
                    Ok(_) => client.left = args.events,
                    Err(error) => return error.kind() == ErrorKind::WouldBlock,
                }
                return client.stream.write_all(HEAD).is_ok();
            }
            client.left -= 1;
            let ends = client.left == 0;
            client.stream.write_all(&event).is_ok()
                && (!ends || client.stream.write_all(&done).is_ok())
        });
        next += pause;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}
