//! Block hashes and proofs: known answers that Python shares, and the properties that the prefix cache rests on.

use std::num::NonZeroUsize;

use headrace_router::core::blocks::{BlockHash, BlockKey, hash_blocks, hash_blocks_le};
use headrace_router::core::secret::{AuthKey, HashKey, Side};
use proptest::prelude::*;
use serde_json::Value;

const KEY: HashKey = HashKey([7; 32]);

fn size(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).expect("a test's block size")
}

fn from_root(key: &HashKey, salt: &[u8], tokens: &[u32], block_tokens: usize) -> Vec<BlockHash> {
    hash_blocks(key, BlockHash::root(key, salt), tokens, size(block_tokens))
}

fn first16(hash: &[u8; 32]) -> BlockHash {
    BlockHash(hash[..16].try_into().unwrap())
}

/// The definition in other words, with what `blake3` documents: one incremental hasher per input.
fn by_definition(
    key: &HashKey,
    salt: &[u8],
    tokens: &[u32],
    block_tokens: usize,
) -> Vec<BlockHash> {
    let keyed = |key: &[u8; 32], input: &[&[u8]]| {
        let mut hasher = blake3::Hasher::new_keyed(key);
        input.iter().for_each(|part| _ = hasher.update(part));
        *hasher.finalize().as_bytes()
    };
    let block_key = keyed(&key.0, &[b"headrace tokens"]);
    let mut last = keyed(&key.0, &[b"headrace root", salt]);
    let mut hashes = Vec::new();
    for block in tokens.chunks(block_tokens).filter(|block| block.len() == block_tokens) {
        let bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
        let digest = keyed(&block_key, &[&bytes]);
        last = keyed(&key.0, &[b"headrace chained", &last[..16], &digest[..16]]);
        hashes.push(first16(&last));
    }
    hashes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn known_answers_hold() {
    let golden: Value = serde_json::from_str(include_str!("../golden/blocks.json")).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let cases = golden["hashes"].as_array().unwrap();
    assert!(cases.len() >= 5);
    for case in cases {
        let key = HashKey::derive(text(&case["secret"]).as_bytes());
        assert_eq!(hex(&key.0), text(&case["key"]));
        let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).unwrap();
        let block_tokens = serde_json::from_value(case["block_tokens"].clone()).unwrap();
        let salt = text(&case["salt"]);
        assert_eq!(hex(&BlockHash::root(&key, salt.as_bytes()).0), text(&case["root"]));
        let hashes = from_root(&key, salt.as_bytes(), &tokens, block_tokens);
        let hashes: Vec<String> = hashes.iter().map(|hash| hex(&hash.0)).collect();
        let expected: Vec<String> = serde_json::from_value(case["hashes"].clone()).unwrap();
        assert_eq!(hashes, expected);
    }
    for case in golden["proofs"].as_array().unwrap() {
        let auth = AuthKey::derive(text(&case["secret"]).as_bytes());
        let challenge: Vec<u8> = serde_json::from_value(case["challenge"].clone()).unwrap();
        assert_eq!(hex(&auth.proof(Side::Worker, &challenge)), text(&case["worker"]));
        assert_eq!(hex(&auth.proof(Side::Router, &challenge)), text(&case["router"]));
    }
}

#[test]
fn the_key_of_a_block_is_the_little_endian_start_of_its_hash() {
    let hash = BlockHash([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
    assert_eq!(hash.key(), BlockKey(0x0807_0605_0403_0201));
}

#[test]
fn an_unfinished_block_has_no_hash() {
    assert!(from_root(&KEY, b"", &[1, 2, 3], 4).is_empty());
    assert_eq!(from_root(&KEY, b"", &[1, 2, 3, 4], 4).len(), 1);
    assert_eq!(from_root(&KEY, b"", &[1, 2, 3, 4, 5], 4).len(), 1);
    let huge = size(usize::MAX);
    assert!(hash_blocks_le(&KEY, BlockHash([0; 16]), &[0; 64], huge).is_empty());
}

/// Below, at and beyond the sizes and group lengths that are computed side by side.
#[test]
fn every_block_size_and_number_of_blocks_follows_the_definition() {
    let root = BlockHash::root(&KEY, b"");
    for block_tokens in 1..=260 {
        let tokens: Vec<u32> = (0..block_tokens as u32 * 35 + 1).map(|i| i ^ 0x5A5A_0000).collect();
        let expected = by_definition(&KEY, b"", &tokens, block_tokens);
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        for blocks in 0..=35 {
            let some = &bytes[..blocks * block_tokens * 4 + 3];
            let hashes = hash_blocks_le(&KEY, root, some, size(block_tokens));
            assert_eq!(hashes, expected[..blocks], "{blocks} blocks of {block_tokens}");
        }
    }
}

/// Clients choose tokens: what they spell is not hashed as a root or a link of the chain.
#[test]
fn tokens_are_no_other_kind_of_input() {
    let root = BlockHash::root(&KEY, b"123");
    let as_others = |input: &[u8]| first16(blake3::keyed_hash(&KEY.0, input).as_bytes());
    let link = |digest: BlockHash| [&b"headrace chained"[..], &root.0, &digest.0].concat();
    assert_eq!(as_others(b"headrace root123"), root);
    for spelled in [b"headrace root123".to_vec(), link(root)] {
        let tokens: Vec<u32> =
            spelled.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        let hashes = hash_blocks(&KEY, root, &tokens, size(tokens.len()));
        assert_ne!(hashes, [as_others(&link(as_others(&spelled)))]);
    }
}

#[test]
fn key_and_salt_enter_every_hash() {
    let tokens: Vec<u32> = (0..64).collect();
    let plain = from_root(&KEY, b"", &tokens, 16);
    let salted = from_root(&KEY, b"tenant", &tokens, 16);
    let other_key = from_root(&HashKey([8; 32]), b"", &tokens, 16);
    for ((plain, salted), other) in plain.iter().zip(&salted).zip(&other_key) {
        assert!(plain != salted && plain != other && salted != other);
    }
}

#[test]
fn a_proof_holds_for_its_side_challenge_and_secret_only() {
    let auth = AuthKey::derive(b"secret");
    let proof = auth.proof(Side::Worker, b"0123456789abcdef");
    assert!(auth.verify(Side::Worker, b"0123456789abcdef", &proof));
    assert!(!auth.verify(Side::Router, b"0123456789abcdef", &proof));
    assert!(!auth.verify(Side::Worker, b"another", &proof));
    assert!(!AuthKey::derive(b"Secret").verify(Side::Worker, b"0123456789abcdef", &proof));
    assert!(!auth.verify(Side::Worker, b"0123456789abcdef", &proof[..31]));
    assert!(!auth.verify(Side::Worker, b"0123456789abcdef", b""));
}

#[test]
fn keys_do_not_print() {
    let shown = format!("{KEY:?} {:?}", AuthKey::derive(b"secret"));
    assert_eq!(shown, "HashKey(..) AuthKey(..)");
}

proptest! {
    #[test]
    fn hashes_follow_the_definition(
        key: [u8; 32],
        salt: Vec<u8>,
        tokens in prop::collection::vec(any::<u32>(), 0..700),
        block_tokens in prop_oneof![1usize..40, Just(16), Just(32), Just(64)],
    ) {
        let key = HashKey(key);
        let hashes = from_root(&key, &salt, &tokens, block_tokens);
        prop_assert_eq!(&hashes, &by_definition(&key, &salt, &tokens, block_tokens));
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let root = BlockHash::root(&key, &salt);
        prop_assert_eq!(hash_blocks_le(&key, root, &bytes, size(block_tokens)), hashes);
    }

    #[test]
    fn hashing_can_go_on_from_any_block(
        tokens in prop::collection::vec(any::<u32>(), 0..700),
        block_tokens in 1usize..20,
        cut in 0usize..70,
    ) {
        let whole = from_root(&KEY, b"", &tokens, block_tokens);
        let cut = cut.min(whole.len());
        let parent = if cut == 0 { BlockHash::root(&KEY, b"") } else { whole[cut - 1] };
        let rest = hash_blocks(&KEY, parent, &tokens[cut * block_tokens..], size(block_tokens));
        prop_assert_eq!(&whole[cut..], rest);
    }

    #[test]
    fn one_changed_token_changes_its_block_and_all_after_it(
        mut tokens in prop::collection::vec(any::<u32>(), 1..500),
        block_tokens in prop_oneof![Just(4usize), Just(16)],
        at: prop::sample::Index,
    ) {
        let before = from_root(&KEY, b"", &tokens, block_tokens);
        let at = at.index(tokens.len());
        tokens[at] ^= 1;
        let after = from_root(&KEY, b"", &tokens, block_tokens);
        for (i, (before, after)) in before.iter().zip(&after).enumerate() {
            prop_assert_eq!(before == after, i < at / block_tokens);
        }
    }
}
