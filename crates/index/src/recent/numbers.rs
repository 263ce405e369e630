//! Numbers of the recent images' hash pages, dense from zero, so that entries of C0 and C1 have spare bits for more
//! of their digest: each false hit costs a page read.
//!
//! Numbers are assigned in regions of consecutive pages of one image, the lowest free region first. The bits of an
//! entry above the highest number assigned so far hold digest bits.

use drover_core::Digest;

/// Pages per region, as a power of two: 1.3 GiB of data.
const REGION_BITS: u8 = 10;

/// The image pages that a region covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    pub slot: u8,
    /// Index of the region within the image.
    pub part: u32,
}

/// The assignment of numbers to images.
#[derive(Debug)]
pub(crate) struct Numbers {
    regions: Vec<Option<Region>>,
    /// The regions of each slot, in order.
    of_slot: Vec<Vec<u32>>,
    /// Maximum pages per image, and pages per region, as powers of two.
    address_bits: u8,
    region_bits: u8,
    /// Bits of an entry besides its fingerprint, and how many of them hold numbers.
    bits: u8,
    used_bits: u8,
}

fn low(bits: u8) -> u32 {
    (1u64 << bits).wrapping_sub(1) as u32
}

impl Numbers {
    /// For `2^file_bits` images of up to `2^address_bits` pages.
    pub(crate) fn new(file_bits: u8, address_bits: u8) -> Self {
        let region_bits = REGION_BITS.min(address_bits);
        Numbers {
            regions: Vec::new(),
            of_slot: vec![Vec::new(); 1 << file_bits],
            address_bits,
            region_bits,
            bits: file_bits + address_bits,
            used_bits: region_bits,
        }
    }

    /// The number of an image's page, if it has one.
    pub(crate) fn find(&self, slot: u8, page: u64) -> Option<u32> {
        let part = usize::try_from(page >> self.region_bits).ok()?;
        let region = self.of_slot.get(usize::from(slot))?.get(part)?;
        Some(region << self.region_bits | page as u32 & low(self.region_bits))
    }

    /// Assigns numbers to the image's pages up to this one. `false` when none are left.
    /// [`used_bits`](Self::used_bits) may increase.
    pub(crate) fn give(&mut self, slot: u8, page: u64) -> bool {
        if page >> self.address_bits != 0 {
            return false;
        }
        let part = (page >> self.region_bits) as u32;
        let Some(parts) = self.of_slot.get_mut(usize::from(slot)) else {
            return false;
        };
        for part in parts.len() as u32..=part {
            let free = self.regions.iter().position(Option::is_none);
            let region = free.unwrap_or(self.regions.len());
            if region == self.regions.len() {
                self.regions.push(None);
            }
            self.regions[region] = Some(Region { slot, part });
            parts.push(region as u32);
        }
        self.used_bits = self.used_bits.max(self.needed_bits());
        true
    }

    /// Bits needed for the numbers assigned.
    fn needed_bits(&self) -> u8 {
        let regions = self.regions.len().max(1).next_power_of_two();
        self.region_bits + regions.ilog2() as u8
    }

    /// Releases an image's numbers; no entry may contain them any more.
    pub(crate) fn take_back(&mut self, slot: u8) {
        let Some(parts) = self.of_slot.get_mut(usize::from(slot)) else {
            return;
        };
        for region in std::mem::take(parts) {
            self.regions[region as usize] = None;
        }
        while let Some(None) = self.regions.last() {
            self.regions.pop();
        }
    }

    /// An entry without its fingerprint: the page's number, and above it digest bits.
    #[inline]
    pub(crate) fn payload(&self, number: u32, digest: &Digest) -> u32 {
        number | self.check(digest)
    }

    /// Whether an entry's bits above the number match the digest.
    #[inline]
    pub(crate) fn agrees(&self, payload: u32, digest: &Digest) -> bool {
        payload & !low(self.used_bits) == self.check(digest)
    }

    #[inline]
    fn check(&self, digest: &Digest) -> u32 {
        // Bytes not used for the fingerprint, the bucket or the choice of anchors.
        let of_digest = u32::from(u16::from_le_bytes([digest.0[10], digest.0[11]])) << 16;
        (of_digest >> (32 - self.bits)) & !low(self.used_bits)
    }

    /// The image and the page that an entry refers to.
    #[inline]
    pub(crate) fn page(&self, payload: u32) -> Option<(u8, u64)> {
        let number = payload & low(self.used_bits);
        let region = (*self.regions.get((number >> self.region_bits) as usize)?)?;
        let page = u64::from(region.part) << self.region_bits;
        Some((
            region.slot,
            page | u64::from(number & low(self.region_bits)),
        ))
    }

    /// How many of an entry's low bits hold a number; the others hold digest bits.
    pub(crate) fn used_bits(&self) -> u8 {
        self.used_bits
    }

    /// The assignment of regions, to be saved.
    pub(crate) fn regions(&self) -> &[Option<Region>] {
        &self.regions
    }

    /// Restores a saved assignment. Returns `false`, with nothing restored, when it is inconsistent.
    pub(crate) fn restore(&mut self, used_bits: u8, regions: &[Option<Region>]) -> bool {
        let mut of_slot: Vec<Vec<(u32, u32)>> = vec![Vec::new(); self.of_slot.len()];
        for (number, region) in regions.iter().enumerate() {
            let Some(region) = region else { continue };
            let Some(parts) = of_slot.get_mut(usize::from(region.slot)) else {
                return false;
            };
            parts.push((region.part, number as u32));
        }
        for parts in &mut of_slot {
            parts.sort_unstable();
            let most = 1 << (self.address_bits - self.region_bits);
            let in_row = parts.iter().enumerate().all(|(i, p)| p.0 == i as u32);
            if !in_row || parts.len() > most {
                return false;
            }
        }
        let restored = Numbers {
            regions: regions.to_vec(),
            of_slot: of_slot
                .into_iter()
                .map(|parts| parts.into_iter().map(|p| p.1).collect())
                .collect(),
            used_bits,
            ..*self
        };
        let good = (restored.needed_bits()..=self.bits).contains(&used_bits);
        if good {
            *self = restored;
        }
        good
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn digest(n: u16) -> Digest {
        let mut d = Digest::default();
        d.0[10..12].copy_from_slice(&n.to_le_bytes());
        d
    }

    proptest! {
        /// After any sequence of assignments and releases, a number leads to the page that it was assigned to.
        #[test]
        fn a_number_is_of_one_page(ops in proptest::collection::vec((0u8..4, 0u64..40_000, any::<u16>(), 0u8..6), 0..80)) {
            let mut numbers = Numbers::new(2, 15);
            let mut entries: Vec<(u32, u8, u64, u16)> = Vec::new();
            for (slot, page, n, what) in ops {
                if what == 0 {
                    entries.retain(|e| e.1 != slot);
                    numbers.take_back(slot);
                    continue;
                }
                let before = numbers.used_bits();
                let given = numbers.give(slot, page);
                prop_assert_eq!(given, page < 1 << 15);
                for e in &mut entries {
                    for bit in before..numbers.used_bits() {
                        e.0 &= !(1 << bit);
                    }
                }
                if given {
                    let number = numbers.find(slot, page).unwrap();
                    entries.push((numbers.payload(number, &digest(n)), slot, page, n));
                }
                let mut again = Numbers::new(2, 15);
                prop_assert!(again.restore(numbers.used_bits(), numbers.regions()));
                for &(payload, slot, page, n) in &entries {
                    prop_assert!(payload >> 17 == 0);
                    for numbers in [&numbers, &again] {
                        prop_assert_eq!(numbers.page(payload), Some((slot, page)));
                        prop_assert!(numbers.agrees(payload, &digest(n)));
                    }
                }
            }
        }
    }

    #[test]
    fn few_pages_leave_bits_for_the_digest() {
        let mut numbers = Numbers::new(5, 19);
        assert!(numbers.give(3, 0) && numbers.give(9, 5000));
        // 6 regions of 2^10 pages.
        assert_eq!(numbers.used_bits(), 13);
        let payload = numbers.payload(numbers.find(3, 7).unwrap(), &digest(0xabcd));
        let other = (0..=u16::MAX).filter(|&n| numbers.agrees(payload, &digest(n)));
        assert_eq!(other.count(), 1 << (16 - 11));
        assert_eq!(numbers.find(3, 1 << 10), None);
        assert!(!numbers.give(3, 1 << 19));
    }

    #[test]
    fn what_makes_no_sense_is_not_restored() {
        let region = |slot, part| Some(Region { slot, part });
        let mut numbers = Numbers::new(2, 15);
        for (bits, regions) in [
            (10, vec![region(0, 0), region(1, 0)]),
            (18, vec![region(0, 0)]),
            (11, vec![region(4, 0)]),
            (11, vec![region(0, 1)]),
            (11, vec![region(0, 0), region(0, 0)]),
        ] {
            assert!(!numbers.restore(bits, &regions));
        }
        assert!(numbers.restore(11, &[None, region(0, 0)]));
        assert_eq!(numbers.page(1 << 10), Some((0, 0)));
        assert_eq!(numbers.page(0), None);
    }
}
