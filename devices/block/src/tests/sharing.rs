//! Several engines on one image.

use std::{collections::VecDeque, sync::Barrier};

use vm_memory::Bytes;

use super::*;

const ENGINES: u64 = 4;
const BLOCKS: u64 = 16;

/// Each engine writes and zeroes its own sectors in each block of 4 KiB many times, concurrently
/// with the others. A loss by read-modify-write is detected at once or at the end.
#[rstest]
fn neighbours_in_a_block_keep_what_they_wrote(
    #[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which,
    #[values(Cache::Buffered, Cache::Direct, Cache::Coarse)] cache: Cache,
) {
    let Some(setup) = Setup::new(which, cache, BLOCKS * 4096) else {
        return;
    };
    let pool = setup.pool();
    let barrier = Barrier::new(ENGINES as usize);
    std::thread::scope(|scope| {
        for engine in 0..ENGINES {
            let (setup, pool, barrier) = (&setup, Arc::clone(&pool), &barrier);
            scope.spawn(move || {
                let target = Arc::clone(&setup.target);
                let mut own: Box<dyn Engine> = match setup.which {
                    Which::Uring => Box::new(UringEngine::new(target, pool).unwrap()),
                    Which::OldUring => Box::new(UringEngine::undeferred(target, pool).unwrap()),
                    Which::Threads => Box::new(PoolEngine::new(pool).unwrap()),
                };
                barrier.wait();
                write_own_sectors(&mut *own, engine);
            });
        }
    });
    for (sector, content) in setup.content().chunks(512).enumerate() {
        let (block, place) = (sector as u64 / 8, sector as u64 % 8);
        let expected = last_value(place / 2, block * 2 + place % 2);
        assert!(content.iter().all(|byte| *byte == expected), "sector {sector}");
    }
}

const ROUNDS: u8 = 6;

fn last_value(engine: u64, request: u64) -> u8 {
    value(engine, request, ROUNDS - 1)
}

/// Fill byte of a sector in a round.
fn value(engine: u64, request: u64, round: u8) -> u8 {
    if (request + u64::from(round)).is_multiple_of(7) {
        return 0;
    }
    (engine * 50 + request) as u8 ^ round.wrapping_mul(37) | 1
}

/// Two sectors of each block, one after the other, several under way.
fn write_own_sectors(engine: &mut dyn Engine, number: u64) {
    let memory = memory();
    let mut waiting: VecDeque<(u64, u8)> = VecDeque::new();
    for round in 0..ROUNDS {
        for request_number in 0..BLOCKS * 2 {
            waiting.push_back((request_number, round));
        }
    }
    let mut busy = vec![false; (BLOCKS * 2) as usize];
    while !waiting.is_empty() || engine.in_flight() > 0 {
        while let Some((slot, round)) = waiting.front().copied()
            && !busy[slot as usize]
        {
            waiting.pop_front();
            busy[slot as usize] = true;
            let sector = slot / 2 * 8 + number * 2 + slot % 2;
            let byte = value(number, slot, round);
            let address = slot * 512;
            memory.write_slice(&[byte; 512], GuestAddress(address)).unwrap();
            let offset = sector * SECTOR;
            let (operation, length) = if byte == 0 {
                let zero = Operation::WriteZeroes {
                    offset,
                    length: 512,
                    unmap: round % 2 == 0,
                };
                (zero, 0)
            } else {
                (
                    Operation::Write {
                        offset,
                        stable: false,
                    },
                    512,
                )
            };
            engine.submit(request(&memory, slot as u32, operation, address, length));
        }
        engine.commit().unwrap();
        engine.wait(late()).unwrap();
        let before = engine.in_flight();
        while let Some(completion) = engine.completed() {
            completion.result.unwrap();
            busy[completion.token as usize] = false;
        }
        assert!(engine.in_flight() < before, "nothing completed");
    }
}
