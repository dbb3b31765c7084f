//! The journal's SQLite file, as blocking calls. Used by the journal's thread only.

use super::SCHEMA_VERSION;
use super::record::{Role, VmRecord};
use super::snapshots::SnapshotRecord;
use crate::lifecycle::Phase;
use aenv_protocol::ids::{SandboxId, TemplateId};
use rusqlite::{Connection, ErrorCode, OptionalExtension, ffi, params};
use std::path::Path;

/// The file could not be read or written.
#[derive(Debug, Clone)]
pub(super) struct StoreError {
    /// What SQLite said.
    pub(super) reason: String,
    /// The filesystem has no room for it.
    pub(super) is_full: bool,
}

impl StoreError {
    fn new(reason: String) -> Self {
        Self { reason, is_full: false }
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        let is_full = error.sqlite_error().is_some_and(|error| {
            // The second is the index of the write-ahead log that cannot grow.
            error.code == ErrorCode::DiskFull || error.extended_code == ffi::SQLITE_IOERR_SHMSIZE
        });
        Self { reason: error.to_string(), is_full }
    }
}

impl From<serde_json::Error> for StoreError {
    fn from(error: serde_json::Error) -> Self {
        Self::new(format!("payload: {error}"))
    }
}

/// The open file.
pub(super) struct Store {
    connection: Connection,
}

impl Store {
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        let connection = Connection::open(path)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
             CREATE TABLE IF NOT EXISTS vm(
                 id TEXT PRIMARY KEY, role TEXT NOT NULL, phase TEXT NOT NULL, payload TEXT NOT NULL) WITHOUT ROWID;
             CREATE TABLE IF NOT EXISTS snapshot(id TEXT PRIMARY KEY, payload TEXT NOT NULL) WITHOUT ROWID;",
        )?;
        let store = Self { connection };
        match store.meta("schema_version")? {
            None => store.set_meta("schema_version", &SCHEMA_VERSION.to_string())?,
            Some(version) if version == SCHEMA_VERSION.to_string() => {}
            Some(version) => {
                return Err(StoreError::new(format!(
                    "it has schema version {version}, this program knows version {SCHEMA_VERSION} only: use the \
                     program that wrote it, or move the file away after all its sandboxes are ended"
                )));
            }
        }
        Ok(store)
    }

    pub(super) fn close(self) {
        if let Err((_, error)) = self.connection.close() {
            tracing::warn!(%error, "journal not closed cleanly; nothing committed is lost");
        }
    }

    pub(super) fn put(&mut self, record: &VmRecord) -> Result<(), StoreError> {
        let payload = serde_json::to_string(record)?;
        self.connection
            .prepare_cached(
                "INSERT INTO vm(id, role, phase, payload) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT(id) DO UPDATE SET role = ?2, phase = ?3, payload = ?4",
            )?
            .execute(params![record.id.as_str(), record.role.as_str(), record.phase.as_str(), payload])?;
        Ok(())
    }

    /// What is written by `write` survives a power cut.
    pub(super) fn durably(
        &mut self,
        write: impl FnOnce(&mut Self) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.connection.pragma_update(None, "synchronous", "FULL")?;
        let written = write(self);
        self.connection.pragma_update(None, "synchronous", "NORMAL")?;
        written
    }

    pub(super) fn put_with_snapshots(
        &mut self,
        record: &VmRecord,
        snapshots: &[SnapshotRecord],
    ) -> Result<(), StoreError> {
        self.connection.execute_batch("BEGIN IMMEDIATE")?;
        let written = self
            .put(record)
            .and_then(|()| snapshots.iter().try_for_each(|snapshot| self.put_snapshot(snapshot)))
            .and_then(|()| Ok(self.connection.execute_batch("COMMIT")?));
        if written.is_err() && !self.connection.is_autocommit() {
            self.connection.execute_batch("ROLLBACK")?;
        }
        written
    }

    pub(super) fn forget_vms(&mut self) -> Result<(), StoreError> {
        self.durably(|store| Ok(store.connection.execute_batch("DELETE FROM vm")?))
    }

    pub(super) fn put_snapshot(&mut self, snapshot: &SnapshotRecord) -> Result<(), StoreError> {
        let payload = serde_json::to_string(snapshot)?;
        self.connection
            .prepare_cached(
                "INSERT INTO snapshot(id, payload) VALUES (?1, ?2) ON CONFLICT(id) DO UPDATE SET payload = ?2",
            )?
            .execute(params![snapshot.id.as_str(), payload])?;
        Ok(())
    }

    pub(super) fn remove_snapshot(&mut self, id: &TemplateId) -> Result<(), StoreError> {
        self.connection.prepare_cached("DELETE FROM snapshot WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }

    pub(super) fn snapshots(&mut self) -> Result<Vec<SnapshotRecord>, StoreError> {
        let mut statement = self.connection.prepare("SELECT payload FROM snapshot ORDER BY id")?;
        let payloads = statement.query_map([], |row| row.get::<_, String>(0))?;
        payloads.map(|payload| Ok(serde_json::from_str(&payload?)?)).collect()
    }

    pub(super) fn claim(&mut self, record: &VmRecord) -> Result<bool, StoreError> {
        let payload = serde_json::to_string(record)?;
        let changed = self
            .connection
            .prepare_cached(
                "UPDATE vm SET role = ?2, phase = ?3, payload = ?4 WHERE id = ?1 AND role = ?5 AND phase = ?6",
            )?
            .execute(params![
                record.id.as_str(),
                record.role.as_str(),
                record.phase.as_str(),
                payload,
                Role::Standby.as_str(),
                Phase::Running.as_str(),
            ])?;
        Ok(changed == 1)
    }

    pub(super) fn remove(&mut self, id: &SandboxId) -> Result<(), StoreError> {
        self.connection.prepare_cached("DELETE FROM vm WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }

    pub(super) fn all(&mut self) -> Result<Vec<VmRecord>, StoreError> {
        let mut statement = self.connection.prepare("SELECT payload FROM vm ORDER BY id")?;
        let payloads = statement.query_map([], |row| row.get::<_, String>(0))?;
        payloads.map(|payload| Ok(serde_json::from_str(&payload?)?)).collect()
    }

    pub(super) fn replace_boot_id(&mut self, boot_id: &str) -> Result<Option<String>, StoreError> {
        let before = self.meta("boot_id")?;
        self.set_meta("boot_id", boot_id)?;
        Ok(before)
    }

    fn meta(&self, key: &str) -> Result<Option<String>, StoreError> {
        Ok(self
            .connection
            .query_row("SELECT value FROM meta WHERE key = ?1", [key], |row| row.get(0))
            .optional()?)
    }

    pub(super) fn set_meta(&self, key: &str, value: &str) -> Result<(), StoreError> {
        self.connection.execute(
            "INSERT INTO meta(key, value) VALUES (?1, ?2) ON CONFLICT(key) DO UPDATE SET value = ?2",
            [key, value],
        )?;
        Ok(())
    }

    /// Lets the file have no more pages than so many.
    #[cfg(test)]
    pub(super) fn limit_pages(&mut self, pages: u32) -> Result<(), StoreError> {
        Ok(self.connection.pragma_update(None, "max_page_count", pages)?)
    }
}
