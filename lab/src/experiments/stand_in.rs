//! A stand-in for drover, for the experiments' own tests: a shell script that keeps the promises that scripts rely
//! on, and, if asked, breaks one.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::{Common, Lab};

const SCRIPT: &str = r#"#!/bin/sh
set -e
mkdir -p "$DROVER_HOME/images"
case "$1" in
serve) echo "$DROVER_HOME"; exec sleep 60 ;;
pair) echo "$2" > "$DROVER_HOME/peer" ;;
send)
  name=$(basename "$2")
  to="$(cat "$DROVER_HOME/peer")/images/$name"
  cp "$2" "$to"
  DAMAGE
  size=$(stat -c %s "$2")
  echo '{"event":"progress"}'
  echo '{"event":"done","images":[{"name":"'$name'","size_bytes":'$size',"wire_sent_bytes":'$size',"wire_received_bytes":7,"matched_blocks":1}]}' ;;
esac
"#;

/// The stand-in as a file below `dir`; `damage` is what it does after it has delivered a file.
pub fn binary(dir: &Path, damage: &str) -> PathBuf {
    let drover = dir.join("drover");
    fs::write(&drover, SCRIPT.replace("DAMAGE", damage)).unwrap();
    fs::set_permissions(&drover, fs::Permissions::from_mode(0o755)).unwrap();
    drover
}

/// A lab that measures the stand-in, with `dir/out` for results and `dir/cache` for images.
pub fn lab(dir: &Path, damage: &str) -> Lab {
    Lab {
        common: Common {
            drover: binary(dir, damage),
            dir: dir.join("cache"),
            out: dir.join("out"),
            json: false,
        },
        repeat: 2,
        small: false,
    }
}
