//! What is kept, for whom, and for how long.

use super::*;

const A: OwnerId = 1;
const B: OwnerId = 2;
const TTL: Duration = Duration::from_secs(60);

/// Room for `bytes` in all, and `most` of one owner.
fn shelves(bytes: usize, most: usize) -> Shelves<usize> {
    let config = StoreConfig { bytes, tenant_responses: most, ttl: TTL, file: None };
    Shelves::new(&config, &MemoryPool::private(bytes))
}

/// A value of so many bytes.
fn response(bytes: usize) -> (usize, usize) {
    (bytes, bytes)
}

fn has(shelves: &Shelves<usize>, ids: &[&str]) -> Vec<bool> {
    ids.iter().map(|id| shelves.by_id.contains_key(*id)).collect()
}

#[test]
fn what_is_kept_is_its_owners_alone() {
    let (mut shelves, now) = (shelves(1 << 20, 10), Instant::now());
    assert!(shelves.put(A, "a", response(10), now));
    assert_eq!(shelves.get(A, "a", now).unwrap(), 10);
    assert!(shelves.get(B, "a", now).is_none() && !shelves.delete(B, "a", now));
    assert!(shelves.delete(A, "a", now));
    assert!(shelves.get(A, "a", now).is_none() && !shelves.delete(A, "a", now));
    assert!(shelves.owners.is_empty() && shelves.order.is_empty());
}

#[test]
fn what_is_used_stays_and_what_is_not_goes() {
    let (mut shelves, now) = (shelves(1 << 20, 10), Instant::now());
    for id in ["a", "b"] {
        shelves.put(A, id, response(10), now);
    }
    assert!(shelves.get(A, "a", now + TTL / 2).is_some());
    shelves.expire(now + TTL);
    assert_eq!(has(&shelves, &["a", "b"]), [true, false]);
    assert!(shelves.get(A, "a", now + TTL + TTL / 2).is_none());
    assert!(shelves.owners.is_empty() && shelves.order.is_empty());
    assert_eq!(shelves.memory.used(), 0, "all memory came back");
}

#[test]
fn an_owner_has_a_number_of_them() {
    let (mut shelves, now) = (shelves(1 << 20, 2), Instant::now());
    for id in ["a", "b"] {
        shelves.put(A, id, response(10), now);
    }
    shelves.put(B, "z", response(10), now);
    shelves.get(A, "a", now);
    shelves.put(A, "c", response(10), now);
    assert_eq!(has(&shelves, &["a", "b", "c", "z"]), [true, false, true, true]);
    assert_eq!(shelves.counts(), (3, 1));
    assert_eq!(shelves.counts(), (3, 0));
}

#[test]
fn an_owner_has_half_of_the_bytes_and_others_keep_theirs() {
    let (mut shelves, now) = (shelves(100_000, 1_000), Instant::now());
    shelves.put(B, "z", response(10), now);
    for i in 0..100 {
        assert!(shelves.put(A, &i.to_string(), response(10_000), now));
    }
    assert!(shelves.owners[&A].bytes <= 50_000 && shelves.owners[&A].turns.len() == 4);
    assert_eq!(has(&shelves, &["z", "99", "95"]), [true, true, false]);
    assert!(!shelves.put(A, "large", response(50_000), now));
    assert_eq!(has(&shelves, &["z", "99"]), [true, true]);
}

#[test]
fn where_all_is_full_who_has_most_makes_room() {
    let (mut shelves, now) = (shelves(100_000, 1_000), Instant::now());
    for (owner, id) in [(A, "a1"), (A, "a2"), (B, "b1"), (B, "b2"), (3, "c1")] {
        shelves.put(owner, id, response(18_000), now);
    }
    shelves.put(B, "b2", response(10), now);
    shelves.put(4, "d1", response(30_000), now);
    assert_eq!(
        has(&shelves, &["a1", "a2", "b1", "b2", "c1", "d1"]),
        [false, true, true, true, true, true]
    );
}

#[test]
fn the_same_name_again_takes_the_place_of_the_first() {
    let (mut shelves, now) = (shelves(1 << 20, 10), Instant::now());
    shelves.put(A, "a", response(10), now);
    shelves.put(A, "a", response(20), now);
    assert_eq!(shelves.get(A, "a", now).unwrap(), 20);
    assert_eq!((shelves.by_id.len(), shelves.order.len()), (1, 1));
}

#[test]
fn those_that_went_are_told_once() {
    let (mut shelves, now) = (shelves(1 << 20, 2), Instant::now());
    for id in ["a", "b", "c"] {
        shelves.put(A, id, response(10), now);
    }
    assert_eq!(shelves.gone(), ["a"]);
    shelves.delete(A, "b", now);
    shelves.expire(now + TTL);
    assert_eq!(shelves.gone(), ["b", "c"]);
    assert!(shelves.gone().is_empty());
}

#[test]
fn one_that_was_kept_before_expires_when_it_had_to() {
    let (mut shelves, now) = (shelves(1 << 20, 10), Instant::now());
    assert!(shelves.put_back(A, "old", response(10), now, now + TTL / 4));
    assert!(shelves.put_back(A, "new", response(10), now, now + TTL / 2));
    shelves.expire(now + TTL / 4);
    assert_eq!(has(&shelves, &["old", "new"]), [false, true]);
}
