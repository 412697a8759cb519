//! `bench stalled`: clients that ask for streams and read nothing, so that a router shows what it does with what they do not
//! take. Their connections have small segments and little room, as far clients have: over loopback the kernel alone would
//! hold megabytes of each.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use socket2::{Domain, Protocol, Socket, Type};

use crate::BadInput;

/// Between two looks at which streams have begun.
const LOOK: Duration = Duration::from_millis(100);
/// For what is left of an answer, once it is read at last.
const READ_OUT: Duration = Duration::from_secs(1);

/// Clients that read nothing.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct StalledArgs {
    /// The endpoint: HOST:PORT.
    #[arg(long)]
    target: String,
    /// Name of the model.
    #[arg(long, default_value = "mock")]
    model: String,
    /// Streams, each on its own connection.
    #[arg(long, value_name = "N")]
    streams: usize,
    /// Tokens that each asks for.
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_tokens: u32,
    /// Bytes that a connection's reader has room for.
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    receive_bytes: usize,
    /// Bytes of the largest segment of a connection.
    #[arg(long, value_name = "BYTES", default_value_t = 536)]
    segment_bytes: u32,
    /// Local addresses of the connections, in turns; may be given again.
    #[arg(long, value_name = "ADDRESS")]
    source: Vec<IpAddr>,
    /// Longest wait for the first byte of every stream, in seconds.
    #[arg(long, value_name = "S", default_value_t = 60)]
    begin_timeout_s: u64,
}

/// What became of the streams. Whole, cut and open ones are told apart by reading all at the end.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Stalled {
    streams: usize,
    /// Connections that could not be made, or that broke with the request.
    not_connected: usize,
    /// Answers that are no 200.
    refused: usize,
    /// Streams whose first byte came in time.
    begun: usize,
    /// Streams that came whole once they were read.
    whole: usize,
    /// Streams that their server ended before.
    cut: usize,
    /// Streams that were still being sent.
    open: usize,
    /// Bytes that were read at the end.
    read_bytes: u64,
}

/// Asks, says on standard output how many streams have begun, waits for the end of standard input, and reads what came.
///
/// # Errors
/// The target is no address.
pub(crate) fn run(args: &StalledArgs) -> anyhow::Result<Stalled> {
    // its end is all that is waited for
    run_until(args, || drop(std::io::stdin().read_to_end(&mut Vec::new())))
}

pub(super) fn run_until(args: &StalledArgs, hold: impl FnOnce()) -> anyhow::Result<Stalled> {
    let target = args.target.to_socket_addrs().with_context(|| args.target.clone())?.next();
    let target = target.ok_or_else(|| BadInput(format!("--target {}: no address", args.target)))?;
    let mut streams = ask(args, target);
    let begun = wait_for_first_bytes(&streams, Duration::from_secs(args.begin_timeout_s));
    crate::print(&format_args!("begun {begun} of {}\n", args.streams));
    hold();
    let mut report = Stalled {
        streams: args.streams,
        not_connected: args.streams - streams.len(),
        begun,
        ..Stalled::default()
    };
    for stream in &mut streams {
        report.add(&read_out(stream));
    }
    Ok(report)
}

fn ask(args: &StalledArgs, target: SocketAddr) -> Vec<TcpStream> {
    let body = serde_json::json!({
        "model": args.model, "max_tokens": args.max_tokens, "ignore_eos": true, "stream": true,
        "temperature": 0, "messages": [{"role": "user", "content": "Say much."}],
    });
    let body = body.to_string();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {target}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let asked = (0..args.streams).filter_map(|number| {
        let source = args.source.get(number % args.source.len().max(1)).copied();
        let mut stream = connect(args, target, source).ok()?;
        stream.write_all(request.as_bytes()).ok()?;
        stream.set_nonblocking(true).ok()?;
        Some(stream)
    });
    asked.collect()
}

fn connect(
    args: &StalledArgs,
    target: SocketAddr,
    source: Option<IpAddr>,
) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, Some(Protocol::TCP))?;
    // before the connection is made, so that its other side learns of them
    socket.set_recv_buffer_size(args.receive_bytes)?;
    socket.set_tcp_mss(args.segment_bytes)?;
    if let Some(source) = source {
        socket.bind(&SocketAddr::new(source, 0).into())?;
    }
    socket.connect(&target.into())?;
    Ok(socket.into())
}

/// How many have begun once all have, or once the time is over.
fn wait_for_first_bytes(streams: &[TcpStream], longest: Duration) -> usize {
    let end = Instant::now() + longest;
    loop {
        let begun = streams.iter().filter(|stream| matches!(stream.peek(&mut [0]), Ok(1))).count();
        if begun == streams.len() || Instant::now() > end {
            return begun;
        }
        std::thread::sleep(LOOK);
    }
}

/// What came on a connection, read to its end or to where nothing comes for a while.
#[derive(Debug, PartialEq)]
struct ReadOut {
    bytes: Vec<u8>,
    ended: bool,
}

fn read_out(stream: &mut TcpStream) -> ReadOut {
    let mut out = ReadOut { bytes: Vec::new(), ended: false };
    let mut room = [0; 16 << 10];
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_read_timeout(Some(READ_OUT));
    while !out.is_whole() {
        match stream.read(&mut room) {
            Ok(0) => {
                out.ended = true;
                return out;
            }
            Ok(count) => out.bytes.extend_from_slice(&room[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return out;
            }
            Err(_) => {
                out.ended = true;
                return out;
            }
        }
    }
    out
}

impl ReadOut {
    fn is_whole(&self) -> bool {
        // the last chunk follows within a few bytes
        let tail = &self.bytes[self.bytes.len().saturating_sub(64)..];
        tail.windows(6).any(|window| window == b"[DONE]")
    }
}

impl Stalled {
    fn add(&mut self, out: &ReadOut) {
        self.read_bytes += out.bytes.len() as u64;
        let answered = out.bytes.starts_with(b"HTTP/1.1 ");
        if answered && !out.bytes.starts_with(b"HTTP/1.1 200") {
            self.refused += 1;
        } else if out.is_whole() {
            self.whole += 1;
        } else if out.ended {
            self.cut += 1;
        } else {
            self.open += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_told_apart_by_how_they_end() {
        let mut report = Stalled::default();
        for (text, ended) in [
            ("HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", false),
            ("HTTP/1.1 200 OK\r\n\r\ndata: x", true),
            ("HTTP/1.1 200 OK\r\n\r\ndata: x", false),
            ("HTTP/1.1 503 Busy\r\n\r\n", true),
            ("", true),
            ("", false),
        ] {
            report.add(&ReadOut { bytes: text.into(), ended });
        }
        let Stalled { whole, cut, open, refused, .. } = report;
        assert_eq!((whole, cut, open, refused), (1, 2, 2, 1));
    }
}
