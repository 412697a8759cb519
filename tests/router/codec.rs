//! The codec: whatever comes in, a frame or a named error goes out; and frames on a stream.

mod arbitrary;

use std::time::Duration;

use headrace_router::core::frame::*;
use headrace_router::fleet::codec::{
    CodecError, FrameArrival, FrameReader, FrameWriter, ReadError, decode, encode,
};
use proptest::prelude::*;
use serde::Serialize;
use tokio::io::AsyncWriteExt;

const IN_TIME: Duration = Duration::from_secs(60);

fn body(frame: &Frame) -> Vec<u8> {
    let mut out = Vec::new();
    encode(frame, &mut out).unwrap();
    out
}

fn packed(frame: &Frame) -> Vec<u8> {
    let body = body(frame);
    let len = u32::try_from(body.len()).unwrap();
    [&len.to_le_bytes()[..], &body].concat()
}

fn ping(nonce: u64) -> Frame {
    Frame::Ping(Ping { nonce })
}

/// A valid Step with one output.
fn step() -> Frame {
    let output = Output {
        request: RequestId(9),
        ids: vec![1, 2, 300],
        logprobs: None,
        finish: Some(Finish::Stop),
        cached_tokens: Some(16),
        prompt_logprobs: None,
        drafted: 2,
        accepted: 1,
        pooled: None,
    };
    Frame::Step(Step {
        step: 1,
        ms: 2.5,
        waited_us: 0,
        prefill_tokens: 3,
        prefill_context: 0,
        decode_rows: 4,
        kv_tokens: 5,
        waiting_tokens: 6,
        drafted: 0,
        accepted: 0,
        load: Load::default(),
        outputs: vec![output],
    })
}

/// The body of `frame` as serde sees the types: fields in order of declaration.
fn by_serde(frame: &Frame) -> Vec<u8> {
    fn body<T: Serialize>(number: u8, fields: &T) -> Vec<u8> {
        let mut bytes = rmp_serde::to_vec(fields).unwrap();
        // one more in the array: the type
        if bytes[0] == 0x9f {
            bytes.splice(..1, [0xdc, 0, 16, number]); // which counts up to 15 in its first byte
        } else if bytes[0] == 0xdc {
            bytes[2] += 1;
            bytes.insert(3, number);
        } else {
            bytes[0] += 1;
            bytes.insert(1, number);
        }
        bytes
    }
    match frame {
        Frame::Hello(it) => body(1, it),
        Frame::Prove(it) => body(2, it),
        Frame::Snapshot(it) => body(3, it),
        Frame::Blocks(it) => body(4, it),
        Frame::Step(it) => body(5, it),
        Frame::Model(it) => body(6, it),
        Frame::KvReady(it) => body(7, it),
        Frame::Freed(it) => body(8, it),
        Frame::Failed(it) => body(9, it),
        Frame::Bye(it) => body(10, it),
        Frame::Transferred(it) => body(11, it),
        Frame::Offer(it) => body(12, it),
        Frame::GroupTotals(it) => body(13, it),
        Frame::GrammarTotals(it) => body(14, it),
        Frame::OtherPrompts(it) => body(15, it),
        Frame::Welcome(it) => body(32, it),
        Frame::OtherVersion(it) => body(33, it),
        Frame::Submit(it) => body(34, it),
        Frame::Describe(it) => body(35, it),
        Frame::Cancel(it) => body(36, it),
        Frame::Drain(it) => body(37, it),
        Frame::Ping(it) => body(38, it),
        Frame::Resync(it) => body(39, it),
        Frame::Ticket(it) => body(40, it),
        Frame::Continue(it) => body(41, it),
        Frame::Fetch(it) => body(42, it),
        Frame::Refuse(it) => body(43, it),
    }
}

/// `decode` returns, and what it returns is a frame like any other.
fn is_frame_or_error(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(frame) = decode(bytes) {
        let canonical = body(&frame); // bytes are compared, because a NaN may have come in
        prop_assert_eq!(decode(&canonical).map(|again| body(&again)), Ok(canonical));
    }
    Ok(())
}

proptest! {
    #[test]
    fn frames_survive_the_wire(frame in arbitrary::frame()) {
        prop_assert_eq!(decode(&body(&frame)), Ok(frame));
    }

    #[test]
    fn bytes_are_those_of_the_declared_types(frame in arbitrary::frame()) {
        prop_assert_eq!(body(&frame), by_serde(&frame));
    }

    #[test]
    fn any_bytes_are_a_frame_or_an_error(bytes: Vec<u8>) {
        is_frame_or_error(&bytes)?;
    }

    #[test]
    fn changed_bytes_are_a_frame_or_an_error(
        frame in arbitrary::frame(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = body(&frame);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        is_frame_or_error(&bytes)?;
    }

    #[test]
    fn a_cut_frame_is_truncated(frame in arbitrary::frame(), at: prop::sample::Index) {
        let mut bytes = body(&frame);
        bytes.truncate(at.index(bytes.len()));
        let truncated = matches!(decode(&bytes), Err(CodecError::Truncated { .. }));
        prop_assert!(truncated);
    }

    #[test]
    fn bytes_after_a_frame_are_refused(frame in arbitrary::frame(), tail in prop::collection::vec(any::<u8>(), 1..9)) {
        let extra = tail.len();
        let bytes = [body(&frame), tail].concat();
        prop_assert_eq!(decode(&bytes), Err(CodecError::TrailingBytes { frame: frame.name(), extra }));
    }

    #[test]
    fn a_stream_gives_the_same_frames_however_it_is_cut(
        frames in prop::collection::vec(arbitrary::frame(), 0..5),
        piece in 1usize..5_000,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let sent: Vec<u8> = frames.iter().flat_map(packed).collect();
        let received = runtime.block_on(async {
            let (mut near, far) = tokio::io::duplex(piece);
            let write = async move {
                for piece in sent.chunks(piece) {
                    near.write_all(piece).await.unwrap();
                }
            };
            let read = async move {
                let mut reader = FrameReader::new(far, MAX_FRAME_BYTES);
                let mut received = Vec::new();
                while let Some(frame) = reader.next().await.unwrap() {
                    received.push(frame);
                }
                received
            };
            tokio::join!(write, read).1
        });
        prop_assert_eq!(received, frames);
    }
}

/// What `decode` says about these bytes.
fn error(bytes: &[u8]) -> String {
    decode(bytes).unwrap_err().to_string()
}

#[test]
fn errors_name_the_frame_and_the_field() {
    assert_eq!(error(b""), "frame ends inside frame");
    assert_eq!(error(b"\x90"), "frame: expected a type number, got an empty array");
    assert_eq!(error(b"\x80"), "frame: expected an array, got a map");
    assert_eq!(error(b"\x91\xa5hello"), "frame: expected an integer of 64 bits, got a string");
    assert_eq!(error(b"\x92\x63\x00"), "unknown frame type 99");
    assert_eq!(error(b"\x91\x26"), "ping: expected 1 fields, got 0");
    assert_eq!(error(b"\x93\x26\x01\x02"), "ping: expected 1 fields, got 2");
    assert_eq!(error(b"\x92\x26\xff"), "ping.nonce: expected an integer of 64 bits, got -1");
    assert_eq!(
        error(b"\x92\x26\xcb\0\0\0\0\0\0\0\0"),
        "ping.nonce: expected an integer of 64 bits, got a float"
    );
    assert_eq!(error(b"\x92\x26\xc3"), "ping.nonce: expected an integer of 64 bits, got a bool");
    assert_eq!(error(b"\x92\x26\xc0"), "ping.nonce: expected an integer of 64 bits, got nil");
    assert_eq!(
        error(b"\x92\x26\xd4\x01\x02"),
        "ping.nonce: expected an integer of 64 bits, got an extension"
    );
    assert_eq!(error(b"\x92\x26\xcf\0\0"), "frame ends inside ping.nonce");
    assert_eq!(error(b"\x92\x26\x01\x02"), "1 bytes after the end of a ping frame");
    assert_eq!(error(b"\x92\x02\xa1x"), "prove.proof: expected bytes, got a string");
    assert_eq!(error(b"\x92\x0a\xc4\x01x"), "bye.reason: expected a string, got bytes");
    assert_eq!(
        error(b"\x92\x0a\xa1\xff"),
        "bye.reason: expected UTF-8, got invalid utf-8 sequence of 1 bytes from index 0"
    );
    assert_eq!(error(b"\x92\x0a\xdb\xff\xff\xff\xffx"), "frame ends inside bye.reason");
}

#[test]
fn errors_name_the_place_inside_nested_fields() {
    let bytes = body(&step());
    let ids = bytes.windows(6).position(|w| w == b"\x93\x01\x02\xcd\x01\x2c").unwrap();
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        error(&bytes)
    };
    assert_eq!(
        with(ids + 2, 0xc2),
        "step.outputs[0].ids[1]: expected an integer of 32 bits, got a bool"
    );
    assert_eq!(with(ids, 0x92), "step.outputs[0].logprobs: expected an array, got an integer");
    assert_eq!(
        with(ids + 8, b'x'),
        "step.outputs[0].finish: expected stop, length or cancelled, got \"xtop\""
    );
    assert_eq!(with(ids - 2, 0x95), "step.outputs[0]: expected 9 fields, got 5");
}

#[test]
fn what_the_peer_wrote_is_cut_in_errors() {
    let mut bytes = body(&Frame::Hello(hello()));
    let role = bytes.windows(5).position(|w| w == b"\xa4both").unwrap();
    let long = [&b"\xda\x10\x00"[..], "é".repeat(2048).as_bytes()].concat();
    bytes.splice(role..role + 5, long);
    let message = error(&bytes);
    assert!(
        message.starts_with("hello.role: expected prefill, decode or both, got \"éé"),
        "{message}"
    );
    assert!(message.len() < 300, "{message}");
}

fn hello() -> Hello {
    Hello {
        protocol: PROTOCOL,
        worker: "w".to_owned(),
        epoch: 1,
        role: Role::Both,
        model: "m".to_owned(),
        fingerprints: Fingerprints {
            weights: String::new(),
            tokenizer: String::new(),
            chat_template: String::new(),
            kv_layout: String::new(),
            hash_scheme: String::new(),
            block_tokens: 16,
        },
        capacity: Capacity {
            blocks: 1,
            sequences: 1,
            batched_tokens: 1,
            waiting: 1,
            host_blocks: 0,
            disk_blocks: 0,
        },
        context_tokens: 1,
        group: None,
        transfer: Vec::new(),
        nonce: Vec::new(),
        step_prior: None,
        kv_block_bytes: 0,
        dtype: String::new(),
        aliases: Vec::new(),
        pooled_width: 576,
        queue_rule: QueueRule::Halves,
    }
}

#[test]
fn a_frame_over_the_limit_is_neither_sent_nor_taken() {
    let data = vec![0; MAX_FRAME_BYTES];
    let frame = Frame::Model(ModelPart { fingerprint: String::new(), part: 0, last: true, data });
    let mut out = b"before".to_vec();
    let error = encode(&frame, &mut out).unwrap_err();
    assert!(matches!(error, CodecError::TooLong { limit: MAX_FRAME_BYTES, .. }));
    assert_eq!(out, b"before");
    let mut writer = FrameWriter::new(tokio::io::sink());
    assert_eq!(writer.push(&frame), Err(error));
    assert_eq!(writer.pending(), 0);
    let error = decode(&vec![0; MAX_FRAME_BYTES + 1]).unwrap_err();
    assert_eq!(error, CodecError::TooLong { got: MAX_FRAME_BYTES + 1, limit: MAX_FRAME_BYTES });
}

#[tokio::test]
async fn the_reader_refuses_a_long_frame_by_its_header_alone() {
    let (mut near, far) = tokio::io::duplex(64);
    near.write_all(&1025u32.to_le_bytes()).await.unwrap();
    let mut reader = FrameReader::new(far, 1024);
    // `near` stays open: the reader must not wait for the body
    let error = tokio::time::timeout(IN_TIME, reader.next()).await.unwrap().unwrap_err();
    assert!(
        matches!(error, ReadError::Codec(CodecError::TooLong { got: 1025, limit: 1024 })),
        "{error}"
    );
}

#[tokio::test]
async fn a_frame_may_be_as_long_as_the_limit() {
    let bytes = packed(&ping(1 << 40));
    let mut reader = FrameReader::new(&bytes[..], bytes.len() - 4);
    assert_eq!(reader.next().await.unwrap(), Some(ping(1 << 40)));
    let mut reader = FrameReader::new(&bytes[..], bytes.len() - 5);
    assert!(reader.next().await.is_err());
}

#[test]
fn a_float_may_come_in_32_bits() {
    let wide = [&[0xcb][..], &2.5_f64.to_be_bytes()].concat();
    let narrow = [&[0xca][..], &2.5_f32.to_be_bytes()].concat();
    let body = body(&step());
    let at = body.windows(wide.len()).position(|bytes| bytes == wide).unwrap();
    let short = [&body[..at], &narrow, &body[at + wide.len()..]].concat();
    assert_eq!(decode(&short), Ok(step()));
}

#[tokio::test]
async fn a_stream_that_ends_inside_a_frame_says_so() {
    for cut in 1..packed(&ping(1 << 40)).len() {
        let bytes = [packed(&ping(1)), packed(&ping(1 << 40))[..cut].to_vec()].concat();
        let mut reader = FrameReader::new(&bytes[..], MAX_FRAME_BYTES);
        assert_eq!(reader.next().await.unwrap(), Some(ping(1)));
        let error = reader.next().await.unwrap_err();
        assert!(matches!(error, ReadError::Ended { got } if got == cut), "{error}");
    }
}

#[tokio::test]
async fn one_read_can_bring_several_frames() {
    let bytes: Vec<u8> = (1..=3).map(ping).flat_map(|frame| packed(&frame)).collect();
    let mut reader = FrameReader::new(&bytes[..], MAX_FRAME_BYTES);
    assert_eq!(reader.ready().unwrap(), None);
    assert_eq!(reader.next().await.unwrap(), Some(ping(1)));
    assert_eq!(reader.ready().unwrap(), Some(ping(2)));
    assert_eq!(reader.ready().unwrap(), Some(ping(3)));
    assert_eq!(reader.ready().unwrap(), None);
    assert_eq!(reader.next().await.unwrap(), None);
}

#[tokio::test]
async fn a_cancelled_read_loses_nothing() {
    let (mut near, far) = tokio::io::duplex(1024);
    let mut reader = FrameReader::new(far, MAX_FRAME_BYTES);
    let frame = step();
    for byte in packed(&frame) {
        assert!(futures_util::FutureExt::now_or_never(reader.next()).is_none());
        near.write_all(&[byte]).await.unwrap();
    }
    assert_eq!(reader.next().await.unwrap(), Some(frame));
}

/// Its body comes in pieces: of more than 256 KiB.
fn very_long(bytes: usize) -> Frame {
    let hashes = (0..bytes / 8).flat_map(usize::to_le_bytes).collect();
    Frame::Snapshot(Snapshot { epoch: 1, sequence: 2, hashes, last: true })
}

#[tokio::test]
async fn very_long_frames_come_in_their_order_however_they_are_cut() {
    let frames = [
        ping(1),
        very_long(256 << 10),
        ping(2),
        very_long((256 << 10) - 40),
        very_long((512 << 10) - 8),
        very_long(3 << 20),
        step(),
    ];
    let bytes: Vec<u8> = frames.iter().flat_map(packed).collect();
    for cut in [bytes.len(), 1 << 20, 70_001, 4_099] {
        let (mut near, far) = tokio::io::duplex(cut);
        let sent = bytes.clone();
        let sends = tokio::spawn(async move { near.write_all(&sent).await });
        let mut reader = FrameReader::new(far, MAX_FRAME_BYTES);
        for frame in &frames {
            assert_eq!(reader.next().await.unwrap().as_ref(), Some(frame), "cut after {cut}");
        }
        assert_eq!(reader.next().await.unwrap(), None);
        sends.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_cancelled_read_of_a_very_long_frame_loses_nothing() {
    let frame = very_long(700_000);
    let bytes = [packed(&ping(1)), packed(&frame), packed(&ping(2))].concat();
    let (mut near, far) = tokio::io::duplex(bytes.len());
    let mut reader = FrameReader::new(far, MAX_FRAME_BYTES);
    let mut received = Vec::new();
    for part in bytes.chunks(9_973) {
        near.write_all(part).await.unwrap();
        for _ in 0..3 {
            if let Some(frame) = futures_util::FutureExt::now_or_never(reader.next()) {
                received.extend(frame.unwrap());
            }
        }
    }
    while received.len() < 3 {
        received.extend(reader.next().await.unwrap());
    }
    assert_eq!(received, [ping(1), frame, ping(2)]);
}

#[tokio::test]
async fn a_long_frame_is_told_of_while_it_comes_and_dripping_bytes_are_not() {
    let frame = very_long(700_000);
    let bytes = packed(&frame);
    let (mut near, far) = tokio::io::duplex(bytes.len());
    let mut reader = FrameReader::new(far, MAX_FRAME_BYTES);
    let told = std::cell::RefCell::new(Vec::new());
    let mut look = || {
        let next = reader.next_telling(|arrival| told.borrow_mut().push(arrival));
        futures_util::FutureExt::now_or_never(next).is_some()
    };
    for byte in bytes[..1_000].chunks(1) {
        near.write_all(byte).await.unwrap();
        assert!(!look());
    }
    assert_eq!(*told.borrow(), []);
    for part in bytes[1_000..600_000].chunks(50_000) {
        near.write_all(part).await.unwrap();
        assert!((0..3).all(|_| !look()));
    }
    let parts = told.take();
    assert!((5..=600_000 >> 16).contains(&parts.len()), "{}", parts.len());
    assert!(parts.iter().all(|arrival| *arrival == FrameArrival::Part));
    near.write_all(&bytes[600_000..]).await.unwrap();
    let read = reader.next_telling(|arrival| told.borrow_mut().push(arrival)).await;
    assert_eq!(read.unwrap(), Some(frame));
    assert_eq!(told.borrow().last(), Some(&FrameArrival::Whole));
}

#[tokio::test]
async fn nothing_is_ready_behind_a_very_long_frame_before_it() {
    let frame = very_long(300_000);
    let bytes = [packed(&frame), packed(&ping(2))].concat();
    let (mut near, far) = tokio::io::duplex(bytes.len());
    near.write_all(&bytes).await.unwrap();
    let mut reader = FrameReader::new(far, MAX_FRAME_BYTES);
    assert!(futures_util::FutureExt::now_or_never(reader.next()).is_none());
    assert_eq!(reader.ready().unwrap(), None);
    assert_eq!(reader.next().await.unwrap(), Some(frame));
    assert_eq!(reader.next().await.unwrap(), Some(ping(2)));
}

#[tokio::test]
async fn a_stream_that_ends_inside_a_very_long_frame_says_where() {
    let whole = packed(&very_long(600_000));
    for cut in [5, 70_000, 262_148, 262_149, whole.len() - 1] {
        let mut reader = FrameReader::new(&whole[..cut], MAX_FRAME_BYTES);
        let error = reader.next().await.unwrap_err();
        assert!(matches!(error, ReadError::Ended { got } if got == cut), "{cut}: {error}");
    }
    let mut wrong = whole.clone();
    wrong[4] = 0xc0; // no array
    let mut reader = FrameReader::new(&wrong[..], MAX_FRAME_BYTES);
    let error = reader.next().await.unwrap_err();
    assert!(matches!(error, ReadError::Codec(CodecError::Malformed { .. })), "{error}");
}

#[tokio::test]
async fn a_cancelled_flush_sends_nothing_twice() {
    let (near, far) = tokio::io::duplex(7);
    let mut writer = FrameWriter::new(near);
    let mut reader = FrameReader::new(far, MAX_FRAME_BYTES);
    for nonce in 0..50 {
        writer.push(&ping(nonce)).unwrap();
    }
    let mut received = Vec::new();
    let mut cancelled = 0;
    while writer.pending() > 0 {
        match futures_util::FutureExt::now_or_never(writer.flush()) {
            Some(flushed) => flushed.unwrap(),
            None => cancelled += 1,
        }
        if let Some(frame) = futures_util::FutureExt::now_or_never(reader.next()) {
            received.extend(frame.unwrap());
        }
    }
    writer.close().await.unwrap();
    while let Some(frame) = reader.next().await.unwrap() {
        received.push(frame);
    }
    assert!(cancelled > 10);
    assert_eq!(received, (0..50).map(ping).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_long_frame_keeps_its_place_and_a_dropped_call_loses_nothing() {
    let long = |sequence| {
        let hashes = vec![7; 200_000];
        Frame::Snapshot(Snapshot { epoch: 1, sequence, hashes, last: false })
    };
    let frames = [long(1), ping(2), long(3), long(4), ping(5)];
    let bytes: Vec<u8> = frames.iter().flat_map(packed).collect();
    let mut reader = FrameReader::new(&bytes[..], MAX_FRAME_BYTES);
    let mut received = Vec::new();
    loop {
        tokio::select! {
            biased;
            frame = reader.next() => match frame.unwrap() {
                Some(frame) => received.push(frame),
                None => break,
            },
            () = tokio::task::yield_now() => {}
        }
    }
    assert_eq!(received, frames);
}

#[test]
fn a_frame_has_no_more_runs_of_blocks_than_it_may() {
    let blocks = |runs| {
        let run = StoredRun { parent: None, hashes: Vec::new() };
        let (stored, removed) = (vec![run; runs], Vec::new());
        body(&Frame::Blocks(Blocks {
            epoch: 1,
            sequence: 1,
            stored,
            removed,
            cleared: false,
            tier: 0,
        }))
    };
    assert!(decode(&blocks(1 << 18)).is_ok());
    let error = decode(&blocks((1 << 18) + 1)).unwrap_err();
    assert_eq!(error.to_string(), "blocks.stored: expected at most 262144 items, got 262145");
}
