//! What a site is told of a machine that comes: whatever it is, the command line of the QEMU that is built for it has the options
//! that it may have, and no others.

use drover_hypervisor::spec::{Built, Card, Kernel, Spec, audit, build};
use drover_net::{decode, encode};

pub fn run(data: &[u8]) {
    let Ok(spec) = decode::<Spec>(data) else {
        return;
    };
    assert_eq!(decode::<Spec>(&encode(&spec)).unwrap(), spec);
    for card in [Card::None, Card::User, Card::Tap("tap0".into())] {
        let site = Built {
            program: "/usr/bin/qemu-system-x86_64".into(),
            name: "a,b".into(),
            max_memory: 1 << 40,
            max_cpus: 64,
            network: vec![card],
            kernel: Some(Kernel {
                kernel: "/boot/vmlinuz".into(),
                initrd: Some("/boot/initrd".into()),
                append: "quiet".into(),
            }),
            incoming: data.len() % 2 == 0,
        };
        if let Ok(line) = build(&spec, &site) {
            audit(&line).unwrap();
        }
    }
}
