//! What is sent along with images: their profiles.

use std::path::PathBuf;
use std::sync::Arc;

use drover_agent::error::one_line;
use drover_agent::home::Home;
use drover_agent::profiles;
use drover_agent::text::{bytes, count};
use drover_image::Conversion;
use drover_teleport::SendItem;

/// Adds the profiles of the images, of those that have one, and notes about them. Without them the images are as good. Blocks.
pub fn add_profiles(home: &Home, items: &mut [SendItem], notes: &mut Vec<(PathBuf, String)>) {
    for item in items {
        // As a mere file it is no disk that has one.
        let given = item.profile.take();
        if item.conversion == Conversion::Opaque {
            continue;
        }
        let found = match given {
            Some(given) => profiles::for_file(&given, &item.path).map(Some),
            None => profiles::of_file(home, &item.path),
        };
        let text = match found {
            Ok(None) => continue,
            Ok(Some(profile)) => {
                let text = format!(
                    "its profile is sent along: {}, {}",
                    bytes(profile.bytes()),
                    count(profile.boots().into(), "boot")
                );
                item.profile = Some(Arc::new(profile));
                text
            }
            Err(e) => format!("its profile is not sent along: {}", one_line(&e)),
        };
        notes.push((item.path.clone(), text));
    }
}
