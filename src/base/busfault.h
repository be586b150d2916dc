/* What happens when a mapped file cannot be read any more. */
#ifndef BRAID_BASE_BUSFAULT_H
#define BRAID_BASE_BUSFAULT_H

/* From now on touching a part of a mapped file that is gone (somebody made it shorter, or its disk failed) ends the
 * process with exit code 1 and a message that names the file, instead of by a signal without a word. Data files are
 * read by copies that fail without a signal (file_map_read); weights are read through their maps, and before anything
 * of a run exists. */
void busfault_report(void);

#endif
