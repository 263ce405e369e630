//! Every control message and the ticket: any bytes decode to something that encodes to itself,
//! or are refused.

use drover_net::{Ticket, decode, encode};
use drover_teleport::Unfinished;
use drover_teleport::protocol::{Accept, Delivered, End, Estimate, GiveUp, Offer};
use drover_teleport::services::{
    ImageInfo, IndexImage, JoinSession, KnowFiles, OpenSession, Progress, RemoveImage,
    RemoveTransfer, Verified, VerifyImage,
};
use serde::{Serialize, de::DeserializeOwned};

fn check<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(message) = decode::<T>(bytes) {
        assert_eq!(decode::<T>(&encode(&message)).ok(), Some(message));
    }
}

pub fn run(data: &[u8]) {
    let Some((&which, bytes)) = data.split_first() else {
        return;
    };
    match which {
        0 => {
            check::<OpenSession>(bytes);
            check::<JoinSession>(bytes);
            check::<VerifyImage>(bytes);
            check::<IndexImage>(bytes);
            check::<KnowFiles>(bytes);
            check::<RemoveImage>(bytes);
            check::<RemoveTransfer>(bytes);
        }
        1 => {
            check::<Vec<ImageInfo>>(bytes);
            check::<Vec<Unfinished>>(bytes);
            check::<Progress>(bytes);
            check::<Verified>(bytes);
        }
        2 => check::<Offer>(bytes),
        3 => check::<Accept>(bytes),
        5 => check::<Delivered>(bytes),
        6 => check::<Estimate>(bytes),
        7 => check::<End>(bytes),
        8 => check::<GiveUp>(bytes),
        // A ticket as text, and what a forged one with a good checksum may hold.
        9 => {
            let text = String::from_utf8_lossy(bytes);
            if let Ok(ticket) = text.parse::<Ticket>() {
                assert_eq!(ticket.to_string().parse(), Ok(ticket));
            }
        }
        _ => {
            if let Ok(ticket) = decode::<Ticket>(bytes)
                && let Ok(parsed) = ticket.to_string().parse::<Ticket>()
            {
                assert!(parsed == ticket && parsed.addresses.len() <= Ticket::MAX_ADDRESSES);
            }
        }
    }
}
