//! The text descriptor of a vmdk disk.

use crate::ImageError;
use crate::container::{Part, PartSource};
use crate::limits::MAX_DESCRIPTOR_BYTES;
use crate::reader::Reader;

const FIELD: &str = "descriptor";
const NO_PARENT: &str = "ffffffff";

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) parts: Vec<Part>,
    pub(super) has_parent: bool,
    pub(super) parent_name: Option<String>,
}

/// Reads the text of at most `len` bytes at `offset`.
pub(super) fn read(file: &Reader, offset: u64, len: u64) -> Result<Descriptor, ImageError> {
    if len > MAX_DESCRIPTOR_BYTES {
        return Err(file.damaged(FIELD, format!("{len} bytes are too many")));
    }
    let mut bytes = vec![0; len as usize];
    file.read(offset, &mut bytes, FIELD)?;
    // Embedded ones are padded with zeros.
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    let text =
        std::str::from_utf8(&bytes[..end]).map_err(|_| file.damaged(FIELD, "it is not UTF-8"))?;
    let mut out = Descriptor::default();
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(part) = extent(file, line)? {
            out.parts.push(part);
        } else if let Some((key, value)) = line.split_once('=') {
            let value = value.trim().trim_matches('"');
            match key.trim() {
                "parentCID" => out.has_parent = !value.eq_ignore_ascii_case(NO_PARENT),
                "parentFileNameHint" => out.parent_name = Some(value.to_owned()),
                _ => {}
            }
        }
    }
    Ok(out)
}

/// `RW 4192256 SPARSE "name" [offset]`; `None` for a line of another kind.
fn extent(file: &Reader, line: &str) -> Result<Option<Part>, ImageError> {
    let Some((access, rest)) = line.split_once(' ') else {
        return Ok(None);
    };
    if !matches!(access, "RW" | "RDONLY" | "NOACCESS") {
        return Ok(None);
    }
    let bad = || file.damaged(FIELD, format!("the extent line {line:?}"));
    let (sectors, rest) = rest.trim_start().split_once(' ').ok_or_else(bad)?;
    let len = sectors
        .parse::<u64>()
        .ok()
        .and_then(|s| s.checked_mul(512))
        .filter(|&l| l > 0)
        .ok_or_else(bad)?;
    let rest = rest.trim();
    let (kind, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    if kind == "ZERO" {
        return Ok(Some(Part {
            len,
            source: PartSource::Zero,
        }));
    }
    let (name, rest) = rest
        .trim_start()
        .strip_prefix('"')
        .and_then(|r| r.split_once('"'))
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(bad)?;
    let source = match kind {
        "SPARSE" => PartSource::Sparse(name.to_owned()),
        "FLAT" | "VMFS" => {
            let offset = match rest.trim() {
                "" => Some(0),
                n => n.parse::<u64>().ok().and_then(|s| s.checked_mul(512)),
            };
            let offset = offset
                .filter(|o| o.checked_add(len).is_some())
                .ok_or_else(bad)?;
            PartSource::Flat(name.to_owned(), offset)
        }
        other => return Err(file.unsupported(format!("has extents of the type {other}"))),
    };
    Ok(Some(Part { len, source }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Format;

    fn parse(text: &str) -> Result<Descriptor, ImageError> {
        let bytes = text.as_bytes().to_vec();
        let len = text.len() as u64;
        read(&Reader::new(Arc::new(bytes), Format::Vmdk), 0, len)
    }

    #[test]
    fn extents_and_parents_are_found() {
        let d = parse(
            "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ABCD\n\
             parentFileNameHint=\"base disk.vmdk\"\ncreateType=\"x\"\n\n\
             RW 4 SPARSE \"a b.vmdk\"\nRDONLY 8 FLAT \"f\" 2\nRW 1 ZERO\r\nRW 2 VMFS \"v\"\0junk",
        )
        .unwrap();
        assert!(d.has_parent);
        assert_eq!(d.parent_name.as_deref(), Some("base disk.vmdk"));
        let parts: Vec<_> = d.parts.iter().map(|p| (p.len, p.source.clone())).collect();
        assert_eq!(
            parts,
            [
                (2048, PartSource::Sparse("a b.vmdk".into())),
                (4096, PartSource::Flat("f".into(), 1024)),
                (512, PartSource::Zero),
                (1024, PartSource::Flat("v".into(), 0)),
            ]
        );
    }

    #[test]
    fn extent_lines_that_make_no_sense_are_damage() {
        for bad in [
            "RW x FLAT \"f\" 0",
            "RW 0 FLAT \"f\" 0",
            "RW 36028797018963968 FLAT \"f\" 0",
            "RW 8 FLAT f 0",
            "RW 8 FLAT \"\" 0",
            "RW 8 FLAT \"f\" -1",
            "RW 8 FLAT \"f\" 36028797018963967",
            "RW 8 VMFSSPARSE \"f\"",
            "RW 8",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
