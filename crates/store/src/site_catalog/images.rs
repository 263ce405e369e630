//! Images in the catalog of a site.

use std::collections::HashMap;

use drover_core::ImageName;
use drover_index::ImageId;
use rusqlite::types::Value;

use super::SiteCatalog;
use super::rows::{NEXT_ID, Setting};
use super::seal::Seal;
use super::table::{Row, RowError, SUM, Tables};
use crate::catalog::{Catalog, ImageRecord, Known};
use crate::catalog_error::Result;

/// If more images have changed, all are read at once.
const MAX_ONE_BY_ONE: usize = 64;

/// The checksums of all images, by name.
fn sums(c: &dyn Tables) -> Result<HashMap<String, i64>, RowError> {
    let found = c.select(ImageRecord::TABLE, &[ImageRecord::COLUMNS[0], SUM], None)?;
    let sum = |values: Result<Vec<Value>, RowError>| match values?.as_slice() {
        [Value::Text(name), Value::Integer(sum)] => Ok((name.clone(), *sum)),
        _ => Err(RowError::Damaged(
            "an image without a name or checksum".into(),
        )),
    };
    found.into_iter().map(sum).collect()
}

impl Catalog for SiteCatalog {
    fn new_image_id(&self) -> Result<ImageId> {
        self.change("numbering an image", |tx, seal| {
            let next = match Setting::get(tx, NEXT_ID)? {
                None => 1,
                Some(s) => s
                    .value
                    .parse::<u64>()
                    .map_err(|_| RowError::Damaged("the image counter is not a number".into()))?,
            };
            let after = next.checked_add(1).filter(|&n| i64::try_from(n).is_ok());
            let after =
                after.ok_or_else(|| RowError::Conflict("no image numbers are left".into()))?;
            seal.put(
                tx,
                &Setting {
                    key: NEXT_ID.into(),
                    value: after.to_string(),
                },
            )?;
            Ok(ImageId(next))
        })
    }

    fn images(&self) -> Result<Vec<ImageRecord>> {
        self.read("listing images", ImageRecord::all)
    }

    fn changed(&self, known: &mut Known) -> Result<Option<Vec<ImageRecord>>> {
        let found = self.read("looking for changed images", |c| {
            // Before the rows: what changes meanwhile is read again.
            let revision = Seal::load(c)?.revision;
            if known.revision == Some(revision) {
                return Ok(None);
            }
            let sums = sums(c)?;
            let is_new = |(name, sum): &(&String, &i64)| known.sums.get(*name) != Some(*sum);
            let new: Vec<&String> = sums.iter().filter(is_new).map(|(name, _)| name).collect();
            let changed = match new.len() > MAX_ONE_BY_ONE {
                true => ImageRecord::all(c)?,
                false => {
                    let one = |name: &String| ImageRecord::get(c, name).transpose();
                    new.into_iter().filter_map(one).collect::<Result<_, _>>()?
                }
            };
            let revision = Some(revision);
            Ok(Some((Known { revision, sums }, changed)))
        })?;
        Ok(found.map(|(now, changed)| {
            *known = now;
            changed
        }))
    }

    fn by_name(&self, name: &ImageName) -> Result<Option<ImageRecord>> {
        self.read("finding an image", |c| ImageRecord::get(c, name.as_str()))
    }

    fn put(&self, record: &ImageRecord) -> Result<Option<ImageRecord>> {
        self.change("storing an image", |tx, seal| {
            for number in [
                record.id.0,
                record.size_bytes,
                record.data_bytes,
                record.virtual_bytes,
            ] {
                if i64::try_from(number).is_err() {
                    return Err(RowError::Conflict(format!(
                        "{number} is beyond what the catalog holds"
                    )));
                }
            }
            let same_id = ImageRecord::find(tx, "id", &Value::Integer(record.id.0 as i64))?;
            if let Some(other) = same_id.filter(|o| o.name != record.name) {
                return Err(RowError::Conflict(format!(
                    "image number {} is that of {}",
                    record.id.0, other.name
                )));
            }
            seal.put(tx, record)
        })
    }

    fn remove(&self, name: &ImageName) -> Result<Option<ImageRecord>> {
        self.change("removing an image", |tx, seal| seal.take(tx, name.as_str()))
    }
}
