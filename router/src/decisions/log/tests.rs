//! The file is whole, bounded and gone on with; what cannot be written is counted.

use super::*;

#[derive(Debug, Serialize)]
struct Line {
    n: u32,
    text: String,
}

fn line(n: u32) -> Arc<Line> {
    Arc::new(Line { n, text: "x".repeat(100) })
}

/// A directory of its own, gone with the test.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("headrace-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn log(&self) -> PathBuf {
        self.0.join("decisions.jsonl")
    }

    fn start(&self, max_bytes: u64) -> (DecisionLog<Line>, Arc<Metrics>) {
        let metrics = Arc::new(Metrics::default());
        let config = DecisionLogConfig { path: self.log(), max_bytes };
        (DecisionLog::start(&config, Arc::clone(&metrics)).unwrap(), metrics)
    }

    fn bytes(&self) -> u64 {
        let files = fs::read_dir(&self.0).unwrap();
        files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
    }

    /// The numbers of all lines, the older file first.
    fn numbers(&self) -> Vec<u64> {
        let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
        let text = read(self.0.join("decisions.jsonl.1")) + &read(self.log());
        let number = |line: &str| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["n"].as_u64().unwrap()
        };
        text.lines().map(number).collect()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn lines_are_written_in_order_and_a_new_start_goes_on() {
    let directory = Directory::new("log-order");
    for start in [0, 50] {
        let (log, metrics) = directory.start(1 << 20);
        (start..start + 50).for_each(|n| log.write(&line(n)));
        drop(log);
        assert_eq!(metrics.scheduling.log_dropped.get(), 0);
    }
    assert_eq!(directory.numbers(), (0..100).collect::<Vec<u64>>());
}

#[test]
fn the_disk_never_holds_more_than_the_bound_and_the_newest_lines_stay() {
    let directory = Directory::new("log-bound");
    let mut log = LogFile::open(&directory.log(), 2_000).unwrap();
    for n in 0..200 {
        let mut text = serde_json::to_vec(&*line(n)).unwrap();
        text.push(b'\n');
        log.append(&text).unwrap();
        log.flush().unwrap();
        assert!(directory.bytes() <= 4_000, "{}", directory.bytes());
    }
    let numbers = directory.numbers();
    assert!(numbers.len() >= 2_000 / 120, "{numbers:?}");
    assert_eq!(numbers, (200 - numbers.len() as u64..200).collect::<Vec<_>>());
}

#[test]
fn a_smaller_bound_holds_from_the_start() {
    let directory = Directory::new("log-smaller");
    let (log, _) = directory.start(1 << 20);
    (0..100).for_each(|n| log.write(&line(n)));
    drop(log);
    let (log, _) = directory.start(4_000);
    log.write(&line(100));
    drop(log);
    assert!(directory.bytes() <= 4_000);
    assert_eq!(directory.numbers(), [100]);
}

#[test]
fn a_line_that_a_crash_left_unfinished_does_not_swallow_the_next() {
    let directory = Directory::new("log-torn");
    fs::write(directory.log(), "{\"n\":0,\"te").unwrap();
    let (log, _) = directory.start(1 << 20);
    log.write(&line(1));
    drop(log);
    let text = fs::read_to_string(directory.log()).unwrap();
    assert!(text.starts_with("{\"n\":0,\"te\n{\"n\":1,"), "{text}");
}

#[test]
fn a_line_longer_than_a_file_is_dropped_and_counted() {
    let directory = Directory::new("log-long");
    let (log, metrics) = directory.start(4_000);
    log.write(&Arc::new(Line { n: 0, text: "x".repeat(5_000) }));
    log.write(&line(1));
    drop(log);
    assert_eq!((metrics.scheduling.log_dropped.get(), directory.numbers()), (1, vec![1]));
}

#[test]
fn a_file_that_is_no_log_is_left_alone() {
    let directory = Directory::new("log-mistake");
    fs::write(directory.log(), "root:x:0:0\n").unwrap();
    let config = DecisionLogConfig { path: directory.log(), max_bytes: 1 << 20 };
    let error = DecisionLog::<Line>::start(&config, Arc::default()).unwrap_err();
    assert!(error.to_string().contains("something else"), "{error}");
    assert_eq!(fs::read_to_string(directory.log()).unwrap(), "root:x:0:0\n");
}

#[test]
fn what_the_disk_does_not_take_is_counted() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        return; // only Linux has it
    }
    let metrics = Arc::new(Metrics::default());
    let file = LogFile {
        path: full.into(),
        before: "/dev/null/none".into(),
        file: Some(OpenOptions::new().append(true).open(full).unwrap()),
        max_bytes: 1 << 20,
        bytes: 0,
        buffer: Vec::new(),
        waiting_lines: 0,
        torn: false,
    };
    let mut writer = Writer { file, metrics: Arc::clone(&metrics), failing: false, looked: None };
    let (lines, inbox) = sync_channel(10);
    (0..3).for_each(|n| lines.send(line(n)).unwrap());
    drop(lines);
    writer.run(&inbox);
    assert_eq!(metrics.scheduling.log_errors.get(), 3);
    assert!(writer.failing);
}

/// Only room for directories, as on a disk whose files have taken all: here, a path that leads nowhere.
#[test]
fn a_log_without_a_file_goes_on_when_there_is_room() {
    let directory = Directory::new("log-later");
    let folder = directory.0.join("later");
    let file = LogFile {
        path: folder.join("decisions.jsonl"),
        before: folder.join("decisions.jsonl.1"),
        file: None,
        max_bytes: 1_000,
        bytes: 0,
        buffer: Vec::new(),
        waiting_lines: 0,
        torn: false,
    };
    let metrics = Arc::new(Metrics::default());
    let mut writer = Writer { file, metrics: Arc::clone(&metrics), failing: false, looked: None };
    let mut write = |numbers: std::ops::Range<u32>| {
        let (lines, inbox) = sync_channel(100);
        numbers.for_each(|n| lines.send(line(n)).unwrap());
        drop(lines);
        writer.run(&inbox);
        writer.failing
    };
    assert!(write(0..3));
    assert_eq!(metrics.scheduling.log_errors.get(), 3);
    fs::create_dir(&folder).unwrap();
    assert!(!write(3..20), "some of them begin another file");
    assert_eq!(metrics.scheduling.log_errors.get(), 3);
    let text = fs::read_to_string(folder.join("decisions.jsonl")).unwrap();
    assert!(text.lines().last().unwrap().starts_with("{\"n\":19,"), "{text}");
    fs::remove_dir_all(&folder).unwrap(); // the next file has no place
    assert!(write(20..40));
    fs::create_dir(&folder).unwrap();
    assert!(!write(40..42));
    let text = fs::read_to_string(folder.join("decisions.jsonl")).unwrap();
    let first = text.lines().find(|line| !line.is_empty()).unwrap();
    assert!(first.starts_with("{\"n\":40,"), "{text}");
}

#[test]
fn which_errors_pass_when_there_is_room() {
    assert!(is_full(&io::Error::from_raw_os_error(28)), "ENOSPC");
    assert!(!is_full(&io::ErrorKind::NotFound.into()));
    assert!(!is_full(&io::ErrorKind::PermissionDenied.into()));
}

/// A log with one line in it.
fn begun(directory: &Directory) -> (Writer, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::default());
    let file = LogFile::open(&directory.log(), 1 << 20).unwrap();
    let mut writer = Writer { file, metrics: Arc::clone(&metrics), failing: false, looked: None };
    write(&mut writer, 0);
    (writer, metrics)
}

fn write(writer: &mut Writer, n: u32) {
    let (lines, inbox) = sync_channel(1);
    lines.send(line(n)).unwrap();
    drop(lines);
    writer.run(&inbox);
}

#[test]
fn a_file_that_was_removed_or_put_aside_is_begun_anew() {
    let directory = Directory::new("log-removed");
    let (mut writer, metrics) = begun(&directory);
    fs::remove_file(directory.log()).unwrap();
    writer.looked = None; // a second later
    write(&mut writer, 1);
    assert_eq!(directory.numbers(), [1]);
    fs::rename(directory.log(), directory.0.join("aside")).unwrap();
    writer.looked = None;
    write(&mut writer, 2);
    assert_eq!(directory.numbers(), [2]);
    fs::rename(directory.0.join("aside"), directory.log()).unwrap(); // another log
    writer.looked = None;
    write(&mut writer, 5);
    assert_eq!(directory.numbers(), [1, 5]);
    assert_eq!(
        (metrics.scheduling.log_reopened.get(), metrics.scheduling.log_errors.get()),
        (3, 0)
    );
}

#[test]
fn whether_the_file_is_there_is_looked_at_once_a_second() {
    let directory = Directory::new("log-look");
    let (mut writer, metrics) = begun(&directory);
    fs::remove_file(directory.log()).unwrap();
    let looked = writer.looked.unwrap();
    writer.look(looked + LOOK / 2);
    assert_eq!(metrics.scheduling.log_reopened.get(), 0);
    writer.look(looked + LOOK);
    writer.look(looked + 2 * LOOK);
    assert_eq!(metrics.scheduling.log_reopened.get(), 1);
}

#[test]
fn what_takes_the_place_of_the_file_and_is_no_log_is_left_alone() {
    let directory = Directory::new("log-replaced");
    let (mut writer, metrics) = begun(&directory);
    fs::remove_file(directory.log()).unwrap();
    fs::write(directory.log(), "root:x:0:0\n").unwrap();
    writer.looked = None;
    write(&mut writer, 1);
    assert_eq!(fs::read_to_string(directory.log()).unwrap(), "root:x:0:0\n");
    assert_eq!((metrics.scheduling.log_errors.get(), writer.failing), (1, true));
    fs::remove_file(directory.log()).unwrap();
    write(&mut writer, 2);
    assert_eq!((directory.numbers(), writer.failing), (vec![2], false));
}

#[test]
fn a_file_that_cannot_be_put_aside_stays_within_its_bound() {
    let directory = Directory::new("log-stuck");
    fs::create_dir_all(directory.0.join("decisions.jsonl.1/occupied")).unwrap();
    let (log, metrics) = directory.start(1 << 16);
    (0..1_000).for_each(|n| log.write(&line(n)));
    drop(log);
    let lines = fs::read_to_string(directory.log()).unwrap().lines().count() as u64;
    assert!(lines < 300 && metrics.scheduling.log_errors.get() == 1_000 - lines, "{lines}");
}

#[test]
fn a_full_channel_drops_and_counts() {
    let metrics = Arc::new(Metrics::default());
    let (lines, _inbox) = sync_channel(1);
    let log = DecisionLog { lines: Some(lines), thread: None, metrics: Arc::clone(&metrics) };
    (0..3).for_each(|n| log.write(&line(n)));
    assert_eq!(metrics.scheduling.log_dropped.get(), 2);
}
