//! The requests that a site answers: about its images and transfers, and those that open a session. (The messages of
//! a session are in [`protocol`](crate::protocol).)

use drover_core::{Digest, ImageName};
use drover_net::request;
use drover_store::Likeness;
use serde::{Deserialize, Serialize};

use crate::flock::FlockInfo;
use crate::flock::hints::Claimed;
use crate::transfers::Unfinished;

/// Opens a session to send images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSession {
    /// Number of images to be offered.
    pub images: u32,
    /// The session's ID, chosen at random by the source so that data connections can use it without waiting for the
    /// reply.
    pub session: [u8; 16],
}
request!(OpenSession: "session.open", Send, () => ());

/// Joins a session with a connection that carries literals.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinSession {
    /// The ID from [`OpenSession`].
    pub session: [u8; 16],
}
request!(JoinSession: "session.join", Send, () => ());

/// Begins to send a flock, or to send it again. At most one flock of that name is sent by a site at once: an earlier one is
/// replaced, and what came of it is resumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFlock {
    /// The flock's name.
    pub name: ImageName,
    /// The number of this sending, chosen at random by the source.
    pub id: [u8; 16],
    /// Whether all of its images are delivered, or none.
    pub atomic: bool,
    /// Its images, in the order in which they are sent.
    pub images: Vec<FlockItem>,
}
request!(OpenFlock: "flock.open", Send, () => ());

/// An image of a flock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlockItem {
    /// Its name at the destination.
    pub name: ImageName,
    /// Its digest, if it is not sent because the destination has it.
    pub unchanged: Option<Digest>,
}

/// Opens a session to send images of a flock; there may be several at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendFlock {
    /// Number of images to be offered, at most.
    pub images: u32,
    /// As in [`OpenSession`].
    pub session: [u8; 16],
    /// The number of the flock, from [`OpenFlock`].
    pub flock: [u8; 16],
}
request!(SendFlock: "flock.session", Send, () => ());

/// Ends the sending of a flock. The images of an atomic one get their names now, if all have arrived. May be repeated: the
/// reply is the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndFlock {
    /// The number of the flock.
    pub id: [u8; 16],
    /// The images that could not be sent, as places in [`OpenFlock::images`].
    pub failed: Vec<u32>,
    /// Why, for listings.
    pub why: String,
}
request!(EndFlock: "flock.end", Send, () => FlockInfo);

/// Lists the nodes of the site that take images now; none if it is no site of several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListNodes;
request!(ListNodes: "flock.nodes", Send, () => Vec<SiteNode>);

/// A node of a site, for who sends a flock to several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteNode {
    /// Its name.
    pub name: String,
    /// Where peers reach it.
    pub addresses: Vec<String>,
    /// Images that it receives now.
    pub transfers: u32,
}

/// Upper bound on the runs that a node asks for at once.
pub const MAX_LOOKED: usize = 1024;

/// Upper bound on the pieces of files that an answer names, so that it fits into a message.
pub const MAX_SPANS: usize = 2048;

/// Looks blocks of an image of a flock up in the range of a node, which the caller is about to ask for. Between nodes of one site.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimBlocks {
    /// The number of the flock.
    pub flock: [u8; 16],
    /// The image.
    pub image: u64,
    /// The node that receives it.
    pub node: String,
    /// The short digests, one after the other.
    digests: Vec<u8>,
    /// The compact index of each block.
    indexes: Vec<u64>,
}
request!(ClaimBlocks: "node.claim", Node, () => Claimed);

impl ClaimBlocks {
    /// For these blocks.
    #[must_use]
    pub fn new(flock: [u8; 16], image: u64, node: &str, blocks: &[(Digest, u64)]) -> ClaimBlocks {
        let short = |(digest, _): &(Digest, u64)| digest.0[..Digest::SHORT_LEN].to_vec();
        ClaimBlocks {
            flock,
            image,
            node: node.to_owned(),
            digests: blocks.iter().flat_map(short).collect(),
            indexes: blocks.iter().map(|(_, index)| *index).collect(),
        }
    }

    /// The blocks: their short digests, and their compact indexes.
    #[must_use]
    pub fn blocks(&self) -> Vec<(Digest, u64)> {
        let digests = self.digests.chunks_exact(Digest::SHORT_LEN).map(|short| {
            let mut digest = Digest::default();
            digest.0[..Digest::SHORT_LEN].copy_from_slice(short);
            digest
        });
        digests.zip(self.indexes.iter().copied()).collect()
    }
}

/// Asks a node how blocks of images stand that it receives. Between nodes of one site.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookAt {
    /// Runs: the image, the compact index of the first block, how many; at most [`MAX_LOOKED`].
    pub runs: Vec<(u64, u64, u32)>,
}
request!(LookAt: "node.look", Node, () => Looks);

/// How runs of blocks stand at the node that receives them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Looks {
    /// The node's token, which names its work directory.
    pub token: String,
    /// The keys of the transfers whose partial files have some of them.
    pub keys: Vec<String>,
    /// Of each run that was asked for, in order.
    pub runs: Vec<Looked>,
}

/// How a run of blocks stands at the node that receives it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Looked {
    /// They are still being sent, or are to be asked for again.
    Coming,
    /// They will not come.
    Gone,
    /// The image is one of the site.
    Delivered,
    /// They are in a partial file: that of this key, at these offsets with these lengths.
    There(u32, Vec<(u64, u64)>),
}

/// Lists the flocks that peers send or have sent, one a message; a peer sees its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListFlocks;
request!(ListFlocks: "flock.list", List, Vec<FlockInfo> => ());

/// Has the callee serve as this destination's teleporter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginMatching;
request!(BeginMatching: "matching.begin", Match, () => ());

/// The same for a domain of the destination other than the default one: what it has is never matched for another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginMatchingFor {
    /// The domain's name.
    pub domain: String,
}
request!(BeginMatchingFor: "matching.begin-for", Match, () => ());

/// Lists the images, in pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListImages;
request!(ListImages: "image.list", List, Vec<ImageInfo> => ());

/// Checks an image against its digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyImage {
    /// Name of the image.
    pub name: ImageName,
}
request!(VerifyImage: "image.verify", Read, Progress => Verified);

/// Indexes an image file on the site's machine so that its blocks can be reused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexImage {
    /// Its absolute path.
    pub path: String,
}
request!(IndexImage: "image.index", Manage, Progress => ImageName);

/// Makes the image files of a directory on the site's machine known: they are indexed when a similar image is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnowFiles {
    /// Its absolute path.
    pub directory: String,
}
request!(KnowFiles: "image.know", Manage, Progress => Taken);

/// Upper bound on the files whose reasons are told that were not taken.
pub const MAX_SKIPPED: usize = 100;

/// What became of the files of a directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// Files that were looked at and are known now.
    pub looked: u64,
    /// Files that were known and have not changed.
    pub unchanged: u64,
    /// Files that are indexed already.
    pub indexed: u64,
    /// Files that were not taken.
    pub skipped: u64,
    /// Some of those, with the reasons, at most [`MAX_SKIPPED`].
    pub reasons: Vec<(String, String)>,
    /// Bytes that were read of all files.
    pub read_bytes: u64,
}

/// Removes an image; a peer may remove those that belong to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveImage {
    /// Name of the image.
    pub name: ImageName,
    /// Only report what would be removed.
    pub dry_run: bool,
}
request!(RemoveImage: "image.remove", Cancel, () => Removal);

/// The result of a removal or of its dry run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal {
    /// Whether it was indexed in place: its file stays.
    pub external: bool,
    /// Bytes of the file that are not holes.
    pub data_bytes: u64,
    /// Bytes of the disk that mounts changed; the changes stay.
    pub changed_bytes: u64,
    /// Why it cannot be removed at present; only of a dry run.
    pub held: Option<String>,
}

/// Shares an image with another peer of its site, which may then replace it and write to it; its owner, or the site's
/// user, may.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareImage {
    /// Name of the image.
    pub name: ImageName,
    /// The other peer, by its name at the site.
    pub with: String,
    /// Whether to share it; else it is no longer shared.
    pub share: bool,
}
request!(ShareImage: "image.share", List, () => ());

/// Adds a boot, without digests, to the profile of an image of a site: a profile of that boot, in pieces of at most [`MAX_PIECE`] bytes, which the caller sends as
/// progress. The caller must be one that may change the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutProfile {
    /// Name of the image.
    pub name: ImageName,
    /// Bytes of the profile's file.
    pub bytes: u32,
}
request!(PutProfile: "profile.put", List, Vec<u8> => PutProfileReply);

/// What became of a profile that was given to a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutProfileReply {
    /// Blocks of it that the image has.
    pub blocks: u64,
    /// Blocks that it has not, or with another content.
    pub pruned: u64,
    /// Boots that the image's profile counts now.
    pub boots: u8,
}

/// The largest piece of a profile on its way to a site, in bytes.
pub const MAX_PIECE: usize = 48 << 10;

/// Asks for the profile of an image. It comes in pieces; the reply is the sum of their bytes, 0 if there is no profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetProfile {
    /// Name of the image.
    pub name: ImageName,
}
request!(GetProfile: "profile.get", Read, Vec<u8> => u64);

/// Lists the unfinished transfers, in pages; a peer sees its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListTransfers;
request!(ListTransfers: "transfer.list", List, Vec<Unfinished> => ());

/// Removes a stopped transfer and its data; a peer may remove its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveTransfer {
    /// Its key.
    pub key: String,
}
request!(RemoveTransfer: "transfer.remove", Cancel, () => ());

/// Progress of a long request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Bytes done.
    pub done: u64,
    /// Total bytes.
    pub total: u64,
}

/// Result of a verification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// The digest in the catalog.
    pub expected: Digest,
    /// The digest of the file.
    pub found: Digest,
}

/// An image at a site, for listings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageInfo {
    /// Its name.
    pub name: String,
    /// Its digest (`docs/format/digests.md`).
    pub digest: Digest,
    /// The file's length in bytes.
    pub size_bytes: u64,
    /// Bytes of it that are not holes.
    pub data_bytes: u64,
    /// The size the guest sees, in bytes.
    pub virtual_bytes: u64,
    /// Container format.
    pub format: String,
    /// When it was delivered or indexed, in seconds since 1970.
    pub added_unix: i64,
    /// The name of the peer it came from; empty when it was indexed here.
    pub from: String,
    /// What is in it.
    pub guest: GuestInfo,
}

/// What a look inside an image has found, for listings. Texts are empty where nothing is known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestInfo {
    /// The identifier of the operating system, as `debian`.
    pub system: String,
    /// The identifier of its version.
    pub version: String,
    /// Its name for people.
    pub name: String,
    /// The kind of the file system.
    pub file_system: String,
    /// The number of installed packages.
    pub packages: u32,
}

impl From<&Likeness> for GuestInfo {
    fn from(likeness: &Likeness) -> Self {
        let file_system = likeness.file_system;
        GuestInfo {
            system: likeness.system.clone(),
            version: likeness.version.clone(),
            name: likeness.system_name.clone(),
            file_system: file_system.map_or_else(String::new, |kind| kind.to_string()),
            packages: likeness.packages,
        }
    }
}
