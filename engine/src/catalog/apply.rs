//! Applying a buffer of records to the catalog.

use super::records::RecordBuffer;
use super::state::Catalog;
use crate::error::{Error, ErrorKind, Result};
use stratakv_format::manifest::Record;

impl RecordBuffer {
    /// Applies the records to a catalog, in order. Removes the definitions of frames that the catalog already has.
    ///
    /// A sequence and its forks each define the frames that they share. The first commit adds them.
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`]: a record contradicts the catalog.
    pub(crate) fn apply(&mut self, catalog: &mut Catalog) -> Result<()> {
        let mut known = Vec::new();
        // The frame whose definition was just dropped. Its copies follow directly and are dropped too.
        let mut dropped = None;
        for (index, record) in self.records().enumerate() {
            let applied = record.map_err(|e| e.to_string()).and_then(|record| match record {
                Record::Frame(frame) if catalog.has_frame(frame) => {
                    dropped = Some(frame.frame);
                    known.push(index);
                    Ok(())
                }
                Record::Replica(copy) if dropped == Some(copy.frame) => {
                    known.push(index);
                    Ok(())
                }
                record => {
                    dropped = None;
                    catalog.apply(&record)
                }
            });
            applied.map_err(|e| Error::new(ErrorKind::Corruption, format!("manifest record: {e}")))?;
        }
        if !known.is_empty() {
            self.drop_records(&known);
        }
        Ok(())
    }
}
