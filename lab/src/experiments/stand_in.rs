//! A fake drover for the tests of experiments: a shell script with the interface that experiments rely on and, on
//! request, one fault.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::setup::{Common, Lab};

const SCRIPT: &str = r#"#!/bin/sh
set -e
mkdir -p "$DROVER_HOME/images"
case "$1" in
serve) echo "$DROVER_HOME"; exec sleep 60 ;;
pair) echo "$2" > "$DROVER_HOME/peer" ;;
send)
  shift
  done=
  for image; do
    [ "$image" != far ] || break
    name=$(basename "$image")
    to="$(cat "$DROVER_HOME/peer")/images/$name"
    cp "$image" "$to"
    DAMAGE
    size=$(stat -c %s "$image")
    done="$done${done:+,}"'{"name":"'$name'","size_bytes":'$size',"wire_sent_bytes":'$size',"wire_received_bytes":7,"matched_blocks":1}'
  done
  echo '{"event":"progress"}'
  echo '{"event":"done","images":['"$done"']}' ;;
esac
"#;

/// A lab that measures the fake, with results in `dir/out` and two related images of the small set in `dir/cache`;
/// `damage` is what the fake does after it has delivered a file.
pub fn lab(dir: &Path, damage: &str) -> Lab {
    let (drover, images) = (dir.join("drover"), dir.join("cache/images"));
    fs::write(&drover, SCRIPT.replace("DAMAGE", damage)).unwrap();
    fs::set_permissions(&drover, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir_all(&images).unwrap();
    fs::create_dir(dir.join("out")).unwrap();
    for (name, byte) in [("small-one", 1), ("small-two", 2)] {
        let content = [vec![byte; 4096], vec![9; 8192]].concat();
        fs::write(images.join(format!("{name}.raw")), content).unwrap();
    }
    let common = Common {
        drover,
        dir: dir.join("cache"),
        out: dir.join("out"),
    };
    Lab {
        common,
        repeat: 2,
        small: true,
    }
}
