//! What a peer says of a flock, and the record that is kept of one: any bytes are decoded within the limits, or refused.

use drover_net::{decode, encode};
use drover_teleport::protocol::{Delivered, FlockDelivered};
use drover_teleport::services::{EndFlock, OpenFlock, SendFlock};
use drover_teleport::{FlockInfo, FlockRecord};

pub fn run(data: &[u8]) {
    if let Ok(order) = decode::<OpenFlock>(data) {
        assert_eq!(decode(&encode(&order)).ok(), Some(order));
    }
    if let Ok(request) = decode::<SendFlock>(data) {
        assert_eq!(decode(&encode(&request)).ok(), Some(request));
    }
    if let Ok(end) = decode::<EndFlock>(data) {
        assert_eq!(decode(&encode(&end)).ok(), Some(end));
    }
    if let Ok(info) = decode::<FlockInfo>(data) {
        assert_eq!(decode(&encode(&info)).ok(), Some(info.clone()));
        let mut record = info.record;
        record.fail(&record.why.clone());
        assert!(record.is_over() && record.why.len() <= 1000);
        assert!(!record.why.contains(char::is_control));
    }
    if let Ok(of_flock) = decode::<FlockDelivered>(data) {
        let delivered = Delivered::from(of_flock.clone());
        let again = decode::<FlockDelivered>(&encode(&FlockDelivered::from(delivered))).ok();
        let again = again.map(|again| (again.origins, again.waits, again.delivered.digest));
        let was = (of_flock.origins, of_flock.waits, of_flock.delivered.digest);
        assert_eq!(again, Some(was));
    }
    let _ = FlockRecord::parse(data);
}
