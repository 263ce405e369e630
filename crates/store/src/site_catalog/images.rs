//! Images in the catalog of a site.

use drover_core::ImageName;
use drover_index::ImageId;
use rusqlite::types::Value;

use super::SiteCatalog;
use super::rows::{NEXT_ID, Setting};
use super::table::{Row, RowError};
use crate::catalog::{Catalog, ImageRecord};
use crate::catalog_error::Result;

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
