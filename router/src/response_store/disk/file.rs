//! The file of `--response-store`: an SQLite database that one router has for itself.
//!
//! Changes go to a log beside it (`-wal`), which a clean stop folds in, and which the next start reads after any other. Only
//! the user of the router may read it.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension as _, params};

use crate::limits::memory::MemoryShare;
use crate::response_store::{OwnerId, StoredResponse};

/// In the head of the file: whose it is.
const APPLICATION: i32 = 0x4852_7370; // "HRsp"
/// And how it is laid out. A change of [`TABLES`] is a new number.
const SCHEMA: i32 = 1;

/// `used_ms`: milliseconds since 1970.
const TABLES: &str = "CREATE TABLE responses (
    id TEXT NOT NULL PRIMARY KEY,
    owner INTEGER NOT NULL,
    used_ms INTEGER NOT NULL,
    previous TEXT,
    head BLOB NOT NULL,
    output BLOB NOT NULL,
    tail BLOB NOT NULL,
    input BLOB NOT NULL
) STRICT";

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreFileError {
    #[error("{0}")]
    Open(#[source] io::Error),
    #[error("another router uses it; each one needs a file of its own")]
    InUse,
    #[error("it is not a file of stored responses; name another one")]
    NotOurs,
    #[error("its layout is {found}, and this version knows {SCHEMA} alone; name another file")]
    OtherLayout { found: i32 },
    #[error("it is damaged ({0}); move it away, and a new one is begun")]
    Damaged(String),
    #[error("{0}")]
    Sql(#[source] rusqlite::Error),
}

impl From<rusqlite::Error> for StoreFileError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::InUse,
            Some(ErrorCode::NotADatabase) => Self::NotOurs,
            Some(ErrorCode::DatabaseCorrupt) => Self::Damaged(error.to_string()),
            _ => Self::Sql(error),
        }
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct StoreFile {
    path: PathBuf,
    database: Connection,
}

impl StoreFile {
    /// Opens the file or begins a new one, and keeps every other router out of it. Who has it gets `wait` to let it go.
    ///
    /// # Errors
    /// It cannot be written, belongs to another router, is something else, or is damaged.
    pub(super) fn open(path: &Path, wait: Duration) -> Result<Self, StoreFileError> {
        // a file of the router's user alone, and better words than SQLite's where it cannot be
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.open(path).map_err(StoreFileError::Open)?;
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let database = Connection::open_with_flags(path, flags)?;
        database.busy_timeout(wait)?;
        let word = |pragma: &str| database.query_row(pragma, [], |row| row.get::<_, String>(0));
        word("PRAGMA locking_mode = EXCLUSIVE")?;
        let is_new = is_new(&database)?; // what is not ours stays as it is
        let mode = word("PRAGMA journal_mode = WAL")?;
        if mode != "wal" {
            let problem = format!("SQLite keeps no write-ahead log there, but \"{mode}\"");
            return Err(StoreFileError::Open(io::Error::other(problem)));
        }
        // what a crash of the machine takes is the last responses; what was deleted is overwritten
        database.execute_batch("PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON")?;
        if is_new {
            let begin = format!(
                "BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA}; {TABLES}; COMMIT"
            );
            database.execute_batch(&begin)?;
        }
        let word =
            database.query_row("PRAGMA quick_check(1)", [], |row| row.get::<_, String>(0))?;
        if word != "ok" {
            return Err(StoreFileError::Damaged(word));
        }
        Ok(Self { path: path.to_owned(), database })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Each response, the least recently used first: id, owner, bytes, and when it was used.
    pub(super) fn each(
        &self,
        mut found: impl FnMut(String, OwnerId, usize, u64),
    ) -> Result<(), StoreFileError> {
        let mut rows = self.database.prepare(
            "SELECT id, owner, octet_length(head) + octet_length(output) + octet_length(tail) + octet_length(input)
                 + coalesce(octet_length(previous), 0), used_ms
             FROM responses ORDER BY used_ms, rowid",
        )?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let (owner, bytes, used) =
                (row.get::<_, i64>(1)?, row.get::<_, i64>(2)?, row.get::<_, i64>(3)?);
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            found(row.get(0)?, owner.cast_unsigned(), bytes, u64::try_from(used).unwrap_or(0));
        }
        Ok(())
    }

    /// Writes a response, and takes others out, both or neither.
    pub(super) fn put(
        &mut self,
        forgotten: &[String],
        owner: OwnerId,
        id: &str,
        response: &StoredResponse,
        used_ms: u64,
    ) -> rusqlite::Result<()> {
        let change = self.database.transaction()?;
        remove(&change, forgotten)?;
        let StoredResponse { head, output, tail, input, previous, _memory: _ } = response;
        change.execute(
            "INSERT INTO responses (id, owner, used_ms, previous, head, output, tail, input)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![
                id,
                owner.cast_signed(),
                used_ms.cast_signed(),
                previous,
                &head[..],
                &output[..],
                &tail[..],
                &input[..]
            ],
        )?;
        change.commit()
    }

    /// A response, with the memory that pays for it.
    pub(super) fn get(
        &self,
        id: &str,
        memory: MemoryShare,
    ) -> rusqlite::Result<Option<StoredResponse>> {
        let found = self.database.query_row(
            "SELECT head, output, tail, input, previous FROM responses WHERE id = ?1",
            [id],
            |row| {
                let blob = |at: usize| row.get::<_, Vec<u8>>(at).map(Bytes::from);
                Ok((blob(0)?, blob(1)?, blob(2)?, blob(3)?, row.get(4)?))
            },
        );
        Ok(found.optional()?.map(|(head, output, tail, input, previous)| StoredResponse {
            head,
            output,
            tail,
            input,
            previous,
            _memory: Some(memory),
        }))
    }

    /// It was used then.
    pub(super) fn touch(&self, id: &str, used_ms: u64) -> rusqlite::Result<()> {
        let touch = "UPDATE responses SET used_ms = ?2 WHERE id = ?1";
        self.database.execute(touch, params![id, used_ms.cast_signed()]).map(drop)
    }

    /// Takes responses out.
    pub(super) fn forget(&mut self, ids: &[String]) -> rusqlite::Result<()> {
        let change = self.database.transaction()?;
        remove(&change, ids)?;
        change.commit()
    }

    /// Folds the log in.
    pub(super) fn close(self) -> rusqlite::Result<()> {
        self.database.close().map_err(|(_, error)| error)
    }

    /// As a disk that has no more room than this.
    #[cfg(test)]
    pub(super) fn bound_pages(&self, more: u32) {
        let number = |pragma: &str| self.database.query_row(pragma, [], |row| row.get::<_, u32>(0));
        let pages = number("PRAGMA page_count").unwrap();
        number(&format!("PRAGMA max_page_count = {}", pages + more)).unwrap();
    }
}

/// Whether nothing was ever written.
///
/// # Errors
/// It is no file of stored responses, or one of another layout.
fn is_new(database: &Connection) -> Result<bool, StoreFileError> {
    let number = |pragma: &str| database.query_row(pragma, [], |row| row.get::<_, i32>(0));
    let tables = number("SELECT count(*) FROM sqlite_schema")?;
    let (application, found) = (number("PRAGMA application_id")?, number("PRAGMA user_version")?);
    match (tables, application) {
        (0, 0) => Ok(true),
        (_, APPLICATION) if found == SCHEMA => Ok(false),
        (_, APPLICATION) => Err(StoreFileError::OtherLayout { found }),
        _ => Err(StoreFileError::NotOurs),
    }
}

fn remove(database: &Connection, ids: &[String]) -> rusqlite::Result<()> {
    let mut remove = database.prepare("DELETE FROM responses WHERE id = ?1")?;
    for id in ids {
        remove.execute([id])?;
    }
    Ok(())
}
