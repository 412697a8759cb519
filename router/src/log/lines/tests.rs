//! Whole lines in order, whatever the other end does; what is lost is counted, and said where it is missing.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

/// Soon, on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// An end that takes what it is allowed to: each answer is for one write.
struct Scripted {
    answers: Receiver<Answer>,
    asked: Sender<()>,
    got: Arc<Mutex<Vec<u8>>>,
}

enum Answer {
    /// At most so many bytes.
    Takes(usize),
    Fails(io::ErrorKind),
}

impl io::Write for Scripted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.asked.send(());
        match self.answers.recv() {
            Ok(Answer::Takes(most)) => {
                let taken = bytes.len().min(most);
                self.got.lock().unwrap().extend_from_slice(&bytes[..taken]);
                Ok(taken)
            }
            Ok(Answer::Fails(kind)) => Err(kind.into()),
            Err(_) => {
                self.got.lock().unwrap().extend_from_slice(bytes); // the test lets everything pass
                Ok(bytes.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines to a [`Scripted`] end.
struct Scene {
    lines: Lines,
    answers: Option<Sender<Answer>>,
    asked: Receiver<()>,
    got: Arc<Mutex<Vec<u8>>>,
}

impl Scene {
    fn new(json: bool) -> Self {
        let ((answers, answered), (ask, asked)) = (channel(), channel());
        let got = Arc::default();
        let out = Scripted { answers: answered, asked: ask, got: Arc::clone(&got) };
        Self { lines: Lines::start(out, json).unwrap(), answers: Some(answers), asked, got }
    }

    /// The thread is in a write, which takes until it is answered.
    fn until_it_writes(&self) {
        self.asked.recv_timeout(SOON).expect("the thread writes");
    }

    fn answer(&self, answer: Answer) {
        self.answers.as_ref().unwrap().send(answer).unwrap();
    }

    /// From now on everything is taken; what came in all.
    fn let_pass(&mut self) -> String {
        self.answers = None;
        assert!(self.lines.flush(SOON));
        String::from_utf8(self.got.lock().unwrap().clone()).unwrap()
    }
}

fn numbered(n: usize) -> String {
    format!("line {n} {}\n", "x".repeat(90))
}

#[test]
fn lines_come_whole_and_in_order_however_little_each_write_takes() {
    let mut scene = Scene::new(false);
    let all: String = (0..500).map(numbered).collect();
    (0..500).for_each(|n| scene.lines.push(numbered(n).as_bytes()));
    for most in 1..200 {
        scene.answer(Answer::Takes(most));
    }
    assert_eq!(scene.let_pass(), all);
    assert_eq!(scene.lines.lost(), Lost::default());
}

#[test]
fn an_end_that_takes_nothing_holds_nobody_up_and_the_gap_is_named_where_it_is() {
    let mut scene = Scene::new(false);
    scene.lines.push(b"first\n");
    scene.until_it_writes();
    let many = 3 * WAITING_BYTES / numbered(0).len(); // 3 MB of log, and nobody reads
    (0..many).for_each(|n| scene.lines.push(numbered(n).as_bytes()));
    assert!(!scene.lines.flush(Duration::from_millis(1)));
    let lost = scene.lines.lost().too_slow;
    assert!(lost > 0 && (lost as usize) < many, "{lost} of {many}");
    let passed = scene.let_pass();
    scene.lines.push(b"after\n");
    let all = scene.let_pass();
    let kept = many - lost as usize;
    let before: String = (0..kept).map(numbered).collect();
    let rest = passed.strip_prefix("first\n").unwrap().strip_prefix(&before).unwrap();
    assert!(rest.ends_with(&format!("lost here: {lost} because stderr took them too slowly\n")));
    assert_eq!(rest.lines().count(), 1, "{rest}");
    assert_eq!(all.strip_prefix(&passed), Some("after\n"));
}

#[test]
fn what_waits_never_takes_more_than_the_bound() {
    let scene = Scene::new(false);
    scene.lines.push(b"first\n");
    scene.until_it_writes();
    scene.lines.push(&vec![b'x'; WAITING_BYTES + 1]); // longer than everything may be
    (0..20_000).for_each(|n| scene.lines.push(numbered(n).as_bytes()));
    let state = scene.lines.0.lock();
    assert!(state.waiting.capacity() <= 2 * WAITING_BYTES, "{}", state.waiting.capacity());
    assert_eq!(state.turned_away, 20_001, "after a gap nothing until the thread was there");
}

#[test]
fn a_full_disk_costs_lines_and_the_next_one_that_fits_says_how_many() {
    for (json, says) in [(false, "2 because it could not be written"), (true, "\"write_failed\":2")]
    {
        let mut scene = Scene::new(json);
        scene.lines.push(b"one\n");
        scene.until_it_writes();
        scene.answer(Answer::Fails(io::ErrorKind::StorageFull));
        assert!(scene.lines.flush(SOON));
        scene.lines.push(b"two\n");
        scene.until_it_writes(); // the notice about the first one fails, and its line with it
        scene.answer(Answer::Fails(io::ErrorKind::StorageFull));
        assert!(scene.lines.flush(SOON));
        assert_eq!(scene.lines.lost(), Lost { too_slow: 0, write_failed: 2 });
        scene.lines.push(b"three\n");
        let got = scene.let_pass();
        let (notice, rest) = got.split_once('\n').unwrap();
        assert!(notice.contains(says), "{notice}");
        assert_eq!(rest, "three\n");
        if json {
            serde_json::from_str::<serde_json::Value>(notice).unwrap();
        }
    }
}

#[test]
fn a_line_that_broke_off_does_not_swallow_the_next() {
    let mut scene = Scene::new(false);
    scene.lines.push(b"complete\n");
    scene.until_it_writes();
    scene.answer(Answer::Takes(4));
    scene.until_it_writes();
    scene.answer(Answer::Fails(io::ErrorKind::StorageFull));
    assert!(scene.lines.flush(SOON));
    scene.lines.push(b"next\n");
    let got = scene.let_pass();
    let lines: Vec<&str> = got.lines().collect();
    assert_eq!((lines[0], lines[2], lines.len()), ("comp", "next", 3), "{got}");
    assert!(lines[1].contains("1 because it could not be written"), "{got}");
}

#[test]
fn lines_that_got_out_before_the_failure_are_not_lost_and_the_next_begins_at_once() {
    let mut scene = Scene::new(false);
    scene.lines.push(b"first\n");
    scene.until_it_writes();
    (0..3).for_each(|n| scene.lines.push(format!("{n}\n").as_bytes()));
    scene.answer(Answer::Takes(100));
    scene.until_it_writes();
    scene.answer(Answer::Takes(4)); // two lines of three
    scene.until_it_writes();
    scene.answer(Answer::Fails(io::ErrorKind::StorageFull));
    assert!(scene.lines.flush(SOON));
    assert_eq!(scene.lines.lost(), Lost { too_slow: 0, write_failed: 1 });
    scene.lines.push(b"next\n");
    let got = scene.let_pass();
    let lines: Vec<&str> = got.lines().collect();
    assert_eq!(
        (&lines[..3], lines[4], lines.len()),
        (&["first", "0", "1"][..], "next", 5),
        "{got}"
    );
    let why = io::Error::from(io::ErrorKind::StorageFull).to_string();
    assert!(lines[3].ends_with(&format!("1 because it could not be written ({why})")), "{got}");
}

#[test]
fn an_interrupted_write_is_made_again_and_a_closed_end_is_counted() {
    let mut scene = Scene::new(false);
    scene.lines.push(b"again\n");
    scene.until_it_writes();
    scene.answer(Answer::Fails(io::ErrorKind::Interrupted));
    scene.until_it_writes();
    scene.answer(Answer::Takes(100));
    assert!(scene.lines.flush(SOON));
    for _ in 0..3 {
        scene.lines.push(b"nobody reads this\n");
        scene.until_it_writes();
        scene.answer(Answer::Fails(io::ErrorKind::BrokenPipe));
        assert!(scene.lines.flush(SOON));
    }
    assert_eq!(scene.lines.lost().write_failed, 3);
    assert!(scene.let_pass().starts_with("again\n"));
}

#[test]
fn the_thread_ends_with_its_handle_after_the_last_line() {
    let Scene { lines, answers, got, .. } = Scene::new(false);
    lines.push(b"last\n");
    drop(answers);
    let shared = Arc::downgrade(&lines.0);
    drop(lines);
    let give_up_at = std::time::Instant::now() + SOON;
    while shared.strong_count() > 0 {
        assert!(std::time::Instant::now() < give_up_at, "the thread lives on");
        std::thread::yield_now();
    }
    assert_eq!(&*got.lock().unwrap(), b"last\n");
}

#[test]
fn pieces_are_whole_lines_that_a_pipe_takes_at_once() {
    let lines: String = (0..100).map(numbered).collect();
    let piece = first_piece(lines.as_bytes());
    assert!((PIECE_BYTES - 100..=PIECE_BYTES).contains(&piece), "{piece}");
    assert_eq!(lines.as_bytes()[piece - 1], b'\n');
    let long = format!("{}\nshort\n", "x".repeat(10_000));
    assert_eq!(first_piece(long.as_bytes()), 10_001);
    assert_eq!(first_piece(b"no end"), 6);
}
